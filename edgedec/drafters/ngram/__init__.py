"""Drafts from tables of n-grams: which tokens the target held probable after the last few tokens."""
