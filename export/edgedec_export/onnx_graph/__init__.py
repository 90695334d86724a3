"""The ONNX graph of a decoder, and the file of weights beside it."""
