"""Exports with Hugging Face's optimum, which runs in a Python environment of its own."""
