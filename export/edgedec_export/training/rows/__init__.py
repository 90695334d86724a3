"""Rows that draft in the target's own layers: hidden transfer and prompt tokens, as what learns."""
