"""Drafts copied from text: the prompt, earlier outputs, and a small corpus that edgedec ships."""
