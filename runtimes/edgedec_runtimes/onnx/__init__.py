"""The onnx runtime: models run by ONNX Runtime."""
