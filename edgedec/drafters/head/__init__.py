"""A drafter with a trained head, which reads the target's own hidden states."""
