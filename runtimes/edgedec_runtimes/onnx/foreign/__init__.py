"""Graphs that others export: decoders as Hugging Face's optimum writes them, run by the onnx runtime.

`contract.py` says which graphs, `model.py` and `session.py` run them, `memory.py` plans. What the folder holds beside
the graph is that of our own exports.
"""
