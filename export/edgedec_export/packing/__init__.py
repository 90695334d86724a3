"""Weights packed into blocks of few bits: levels, rounding, and the graph's nodes that read them."""
