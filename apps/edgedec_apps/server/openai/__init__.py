"""The interfaces of OpenAI: chat completions, text completions, responses and embeddings."""
