"""Reading the headers of GGUF files, checked before they are used, and what they say about a model."""
