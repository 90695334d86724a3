"""Runs decoders that Hugging Face's optimum exported, on the onnx runtime.

`contract.py` says which graphs these are, `model.py` and `session.py` run them, `memory.py` plans their memory. The
other files of the folder are those of our own exports.
"""
