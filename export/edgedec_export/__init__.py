"""Export of models: GGUF to a folder for onnxruntime (`to_onnx`), to other GGUFs (`to_gguf`); see docs/export.md."""
