"""Defaults that edgedec --help shows; they have a file of their own so that --help imports nothing else."""

N_DRAFT_MAX = 15  # the most nodes of a draft
