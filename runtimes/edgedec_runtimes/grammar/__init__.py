"""Structured output: grammars by llguidance."""
