"""The decoder as an ONNX graph; all files but library.py and external_data.py import the package onnx."""
