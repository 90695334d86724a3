"""Trained draft heads on the cpu runtime, and beside the models of other runtimes: weights, texts, memory, checks."""
