"""Chat templates out of model files, rendered in a sandbox with a budget."""
