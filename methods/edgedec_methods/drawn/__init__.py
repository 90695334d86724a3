"""Drafts that are drawn from distributions, the shapes of their trees, and the rules that verify them."""
