"""Structured output: texts that keep to a grammar, by llguidance."""
