"""Texts for tests: of many scripts, schemas and grammars, and other tokenizers' ids of them."""
