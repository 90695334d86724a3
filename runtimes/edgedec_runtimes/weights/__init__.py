"""Weights as floats, of GGUFs and of safetensors files, and the values of a checkpoint's config.json."""
