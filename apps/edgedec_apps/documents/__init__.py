"""Documents that a prompt is about: reading them, and searching those that are longer than the context."""
