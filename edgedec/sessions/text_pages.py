"""How many texts of one prompt there may be at a time, and what memory they take."""

from edgedec.callers import checked_value
from edgedec.errors import OptionError

MOST_FORKS = 256
"""Most forks of a session at a time."""
PAGE_TOKENS = 64
"""Tokens of a page of the KV cache: forks share whole pages (the cpu runtime's PAGE_TOKENS)."""
ROWS_OF_TEXT = 2
"""Rows of logits that a search keeps for a text at the most: those before and behind its latest token."""


def n_pages(begin: int, end: int) -> int:
    """Return how many pages of the KV cache hold the tokens [begin, end).

    >>> n_pages(0, 64), n_pages(63, 65), n_pages(64, 64)
    (1, 2, 0)
    """
    return (end - 1) // PAGE_TOKENS - begin // PAGE_TOKENS + 1 if end > begin else 0


def require_count(n: int, name: str) -> int:
    """Return a number of texts, the argument `name` (OptionError unless it is from 1 to MOST_FORKS)."""
    if not 1 <= checked_value(name, int, n) <= MOST_FORKS:
        raise OptionError(name, n, f"it must be from 1 to {MOST_FORKS}, the texts of one prompt")
    return n
