"""Behind which rows of a forward the rows of a row head stand, by what rows cost and how often their drafts are right.

A step's forward has a row for the newest token, a row for each token of its draft, and rows of the head behind some of
these. Where the text goes on is known only afterwards: the rows of the head that stand there are the next draft.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, product

_STEPS = 24  # after which the lengths of drafts are as frequent as they stay


@dataclass(frozen=True, slots=True)
class Placed:
    """How rows are placed, and what is expected of it.

    Attributes:
        counts: How many stand behind the newest token's row, behind that of the draft's first token, and so on.
        speed: Tokens in the time of a plain step.
        extra: What the head's rows add to a forward, in plain steps.
    """

    counts: tuple[int, ...]
    speed: float
    extra: float


@lru_cache(maxsize=64)  # each text asks, and costs change little
def best_places(reach: tuple[float, ...], n: int, below: float, costs: tuple[float, ...]) -> Placed:
    """Return the placement that promises most tokens a second, even where that is less than without the head.

    Args:
        reach: The chance that a draft is right up to its first, second, ... token.
        n: How many rows stand behind a row at most.
        below: The share of a forward below the layer that the head's rows enter.
        costs: The times of forwards of one row, two rows, and so on up to (n + 1)^2.

    >>> best_places((0.4, 0.1), 2, 0.0, (1.0,) * 9).counts
    (2, 2, 2)
    >>> best_places((0.4, 0.1), 2, 0.0, (1.0, 1.15, 1.3, 1.45, 1.6, 1.75, 1.9, 2.05, 2.2)).counts
    (1, 0, 0)
    >>> best_places((0.4, 0.1), 2, 0.0, tuple(map(float, range(1, 10)))).speed < 1
    True
    """
    right = [1.0, *reach[:n], *[0.0] * (n - len(reach))]
    return max((_placed(counts, right, below, costs) for counts in _ways(n)), key=lambda placed: placed.speed)


def _ways(n: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of rows behind the newest token and each token of a draft: never more than before."""
    for counts in product(range(n, -1, -1), repeat=n + 1):
        if counts[0] > 0 and all(a >= b for a, b in pairwise(counts)):
            yield counts


def _placed(counts: tuple[int, ...], right: list[float], below: float, costs: tuple[float, ...]) -> Placed:
    """Return what is expected of a placement, where drafts have the lengths that steps leave in the long run.

    Args:
        counts: The placement.
        right: The chance that a draft is right up to its token number 0 (which is none), 1, 2, ...
        below: As in best_places.
        costs: As in best_places.
    """
    n = len(counts) - 1
    chances = [1.0] + [0.0] * n  # of drafts of each length
    for _ in range(_STEPS):
        after = [0.0] * (n + 1)
        for length, chance in enumerate(chances):
            for accepted in range(length + 1):
                further = right[accepted + 1] if accepted < length else 0.0
                after[counts[accepted]] += chance * (right[accepted] - further)
        chances = after
    plain_s, tokens, seconds, extra_s = costs[0], 0.0, 0.0, 0.0
    for length, chance in enumerate(chances):
        own_s, all_s = costs[length], costs[length + sum(counts[: length + 1])]
        tokens += chance * sum(right[: length + 1])
        seconds += chance * (below * own_s + (1 - below) * all_s)
        extra_s += chance * (1 - below) * (all_s - own_s)
    return Placed(counts, tokens * plain_s / seconds, extra_s / plain_s)
