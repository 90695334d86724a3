"""Leaving out half-layers: sets of them, how a set is searched or chosen, and what it costs in quality."""
