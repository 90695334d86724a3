"""Trained draft heads: reading their files, checking them against their target, what they promise."""
