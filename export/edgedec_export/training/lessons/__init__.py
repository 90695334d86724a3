"""Lessons: the prompts and answers that a target writes, with its hidden states, and the files that keep them."""
