"""GGUF files: their headers, checked before anything is used, and what the headers say of a model."""
