"""Rendering the chat templates of model files, in a sandbox and on a budget."""
