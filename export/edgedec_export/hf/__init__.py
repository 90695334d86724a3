"""Hugging Face checkpoints: their configuration, weights and tokenizers."""
