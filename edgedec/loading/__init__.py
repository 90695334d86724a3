"""What is chosen and loaded before a model is ready: its runtime, a draft model, a small model."""
