"""Drafts from tables of n-grams."""
