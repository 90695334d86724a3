"""Merging neighbours in order of priority: what byte-pair encoding and SentencePiece have in common.

Sennrich et al. 2016, arXiv:1508.07909; Kudo and Richardson 2018, arXiv:1808.06226.
"""

import heapq
from collections.abc import Callable


def merge(symbols: list[bytes], priority: Callable[[bytes, bytes], float | None]) -> list[bytes]:
    """Join neighbours until no pair has a priority: the smallest number first, the leftmost among equals.

    >>> ranks = {(b"l", b"o"): 0, (b"lo", b"w"): 1, (b"w", b"e"): 2}
    >>> merge([b"l", b"o", b"w", b"e"], lambda left, right: ranks.get((left, right)))
    [b'low', b'e']
    """
    n = len(symbols)
    symbols = symbols.copy()
    before, after = list(range(-1, n - 1)), list(range(1, n + 1))
    queue: list[tuple[float, int, int]] = []  # priority, left symbol, length of the two
    for i in range(n - 1):
        found = priority(symbols[i], symbols[i + 1])
        if found is not None:
            queue.append((found, i, len(symbols[i]) + len(symbols[i + 1])))
    heapq.heapify(queue)
    while queue:
        _, i, length = heapq.heappop(queue)
        j = after[i]
        # A symbol only ever grows, so that the length tells whether the pair is still what was put in the queue.
        if not symbols[i] or j == n or len(symbols[i]) + len(symbols[j]) != length:
            continue
        symbols[i] += symbols[j]
        symbols[j] = b""
        j = after[i] = after[j]
        if j < n:
            before[j] = i
            found = priority(symbols[i], symbols[j])
            if found is not None:
                heapq.heappush(queue, (found, i, len(symbols[i]) + len(symbols[j])))
        h = before[i]
        if h >= 0:
            found = priority(symbols[h], symbols[i])
            if found is not None:
                heapq.heappush(queue, (found, h, len(symbols[h]) + len(symbols[i])))
    return [symbol for symbol in symbols if symbol]
