"""The npu runtime: models that `edgedec export --target npu` made, on an NPU through ONNX Runtime's QNN provider."""
