"""Keeping to a memory cap: a plan before loading, a watch while text is generated, and what is shed then."""
