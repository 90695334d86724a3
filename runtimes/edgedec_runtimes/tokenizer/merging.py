"""Merging neighbouring symbols in order of priority, for byte-pair encoding and SentencePiece.

Sennrich et al. 2016, arXiv:1508.07909; Kudo and Richardson 2018, arXiv:1808.06226.
"""

import heapq
from array import array
from collections.abc import Callable

_BITS = 32
_MASK = (1 << _BITS) - 1


def merge(symbols: list[bytes], priority: Callable[[bytes, bytes], int | None]) -> list[bytes]:
    """Return symbols after joining neighbours until no pair has a priority.

    The pair with the smallest priority (0 or more) is joined first, among equal ones the leftmost. A word may be a
    whole text (of a script without spaces), so little is kept for each symbol: its neighbours, and a queued pair as one
    number.

    Args:
        symbols: The symbols to begin with.
        priority: Called with two neighbours; returns their priority, or None where they are not to be joined.

    >>> ranks = {(b"l", b"o"): 0, (b"lo", b"w"): 1, (b"w", b"e"): 2}
    >>> merge([b"l", b"o", b"w", b"e"], lambda left, right: ranks.get((left, right)))
    [b'low', b'e']
    """
    n = len(symbols)
    symbols = symbols.copy()
    before, after = array("q", range(-1, n - 1)), array("q", range(1, n + 1))
    queue: list[int] = []  # priority, left symbol, length of the two
    for i in range(n - 1):
        rank = priority(symbols[i], symbols[i + 1])
        if rank is not None:
            queue.append(_pair(rank, i, len(symbols[i]) + len(symbols[i + 1])))
    heapq.heapify(queue)
    while queue:
        pair = heapq.heappop(queue)
        i, length = pair >> _BITS & _MASK, pair & _MASK
        j = after[i]
        # A symbol only grows, so the length shows whether this is still the pair that was queued.
        if not symbols[i] or j == n or len(symbols[i]) + len(symbols[j]) != length:
            continue
        symbols[i] += symbols[j]
        symbols[j] = b""
        j = after[i] = after[j]
        if j < n:
            before[j] = i
            rank = priority(symbols[i], symbols[j])
            if rank is not None:
                heapq.heappush(queue, _pair(rank, i, len(symbols[i]) + len(symbols[j])))
        h = before[i]
        if h >= 0:
            rank = priority(symbols[h], symbols[i])
            if rank is not None:
                heapq.heappush(queue, _pair(rank, h, len(symbols[h]) + len(symbols[i])))
    return [symbol for symbol in symbols if symbol]


def _pair(priority: int, left: int, length: int) -> int:
    """Return a pair as a number, by which pairs sort by priority, then from left to right."""
    return (priority << _BITS | left) << _BITS | length
