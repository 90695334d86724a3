"""Which tokens a head can draft: those that the target itself writes most often (VocabTrim, arXiv:2506.22694)."""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

LEAST_TOKENS, MOST_TOKENS = 1024, 32768
_OFTEN = 3
COVERAGE = 0.9
"""The share of the answers' tokens that a head can draft, unless the number of tokens is given.

Rare tokens are hardly ever drafted right, and each one's row is read for every draft (docs/heads.md).
"""


def count_tokens(answers: Iterable[NDArray[np.int32]], n_vocab: int) -> NDArray[np.int64]:
    """Return int64[n_vocab], how often each token occurs in the answers."""
    counts = np.zeros(n_vocab, np.int64)
    for token_ids in answers:
        counts += np.bincount(token_ids, minlength=n_vocab)
    return counts


def short_list(counts: NDArray[np.int64], n_tokens: int | None = None, covering: float = COVERAGE) -> NDArray[np.int32]:
    """Return int32[n], the tokens that were written most often, the most frequent first; among equals the lower id.

    Args:
        counts: What count_tokens returned.
        n_tokens: How many; None for as many as make up the share `covering` of all that was written, a multiple of
            1024 from LEAST_TOKENS to MOST_TOKENS.
        covering: The share.
    """
    order = np.argsort(-counts, kind="stable")
    if n_tokens is None:
        n_covering = int(np.searchsorted(np.cumsum(counts[order]), covering * counts.sum())) + 1
        n_tokens = min(MOST_TOKENS, -(-n_covering // LEAST_TOKENS) * LEAST_TOKENS)
    return order[: min(n_tokens, len(counts))].astype(np.int32)


def renewed(token_ids: NDArray[np.int32], counts: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return a list with tokens that answers often have and it lacks, a quarter at most, for the last they lack."""
    strange = counts.copy()
    strange[token_ids] = 0
    new = short_list(strange, len(token_ids) // 4)
    spare = np.flatnonzero(counts[token_ids] < _OFTEN)[::-1]
    n = min(len(spare), int((strange[new] >= _OFTEN).sum()))
    return np.concatenate([np.delete(token_ids, spare[:n]), new[:n]])


def coverage(counts: NDArray[np.int64], token_ids: NDArray[np.int32]) -> float:
    """Return the share of what was counted that a list of tokens makes up; 0 where nothing was counted."""
    total = int(counts.sum())
    return float(counts[token_ids].sum() / total) if total else 0.0
