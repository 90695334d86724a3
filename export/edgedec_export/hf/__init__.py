"""Checkpoints as Hugging Face keeps them: their configuration, weights and tokenizers."""
