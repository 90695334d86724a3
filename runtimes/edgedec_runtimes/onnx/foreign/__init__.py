"""Runs decoders that Hugging Face's optimum exported, on the onnx runtime.

`contract.py` says which graphs these are, `model.py` runs them, `memory.py` plans their memory. The
other files of the folder are those of our own exports.
"""
