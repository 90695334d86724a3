"""Defaults that edgedec --help shows; they have a file of their own so that --help imports nothing else."""

N_DRAFT_MAX = 15  # the most nodes of a draft


def default_n_ctx(n_ctx_train: int) -> int:
    """Return the context that needs no look at memory: what the model was trained for, at most 4,096 tokens."""
    return min(n_ctx_train, 4096) if n_ctx_train > 0 else 4096
