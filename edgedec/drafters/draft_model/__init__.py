"""Drafts by a second, smaller model."""
