"""Leaving out half-layers: sets of them, how a set is chosen, and what it costs in quality."""
