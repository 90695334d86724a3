"""Defaults that the command line shows too; apart, so that showing them imports nothing."""

N_DRAFT_MAX = 15  # nodes of a draft
