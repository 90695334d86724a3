"""Leaving out half-layers in every forward (LOSSY): how a set is chosen, what it costs in quality, and the model."""
