"""The interface of Anthropic: messages, and counting their tokens."""
