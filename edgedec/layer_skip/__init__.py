"""Leaving out half-layers: sets, how they are searched and chosen, and what they cost in quality."""
