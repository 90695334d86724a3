"""The interface of ollama: texts, and the models that there are."""
