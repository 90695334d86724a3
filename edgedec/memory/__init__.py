"""Keeping to a memory cap: planning before loading, watching while running, letting go."""
