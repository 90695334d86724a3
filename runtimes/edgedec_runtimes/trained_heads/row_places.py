"""Behind which rows of a forward the rows of a row head stand, by what rows cost and how often their drafts are right.

A step's forward has a row for the newest token, a row for each token of its draft, and rows of the head behind some of
these. Where the text goes on is known only afterwards: the rows of the head that stand there are the next draft.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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


def best_places(reach: Sequence[float], n: int, below: float, cost: Callable[[int], float]) -> Placed:
    """Return the placement that promises most tokens a second, even where that is less than without the head.

    Args:
        reach: The chance that a draft is right up to its first, second, ... token.
        n: How many rows stand behind a row at most.
        below: The share of a forward below the layer that the head's rows enter.
        cost: Returns the time of a forward of so many rows.

    >>> best_places((0.4, 0.1), 2, 0.0, lambda n_rows: 1.0).counts
    (2, 2, 2)
    >>> best_places((0.4, 0.1), 2, 0.0, lambda n_rows: 1.0 + 0.15 * (n_rows - 1)).counts
    (1, 0, 0)
    >>> best_places((0.4, 0.1), 2, 0.0, lambda n_rows: float(n_rows)).speed < 1
    True
    """
    right = [1.0, *reach[:n], *[0.0] * (n - len(reach))]
    return max((_placed(counts, right, below, cost) for counts in _ways(n)), key=lambda placed: placed.speed)


def _ways(n: int) -> Iterator[tuple[int, ...]]:
    """Yield numbers of rows behind the newest token and each token of a draft: never more than before."""
    for counts in product(range(n, -1, -1), repeat=n + 1):
        if counts[0] > 0 and all(a >= b for a, b in pairwise(counts)):
            yield counts


def _placed(counts: tuple[int, ...], right: list[float], below: float, cost: Callable[[int], float]) -> Placed:
    """Return what is expected of a placement, where drafts have the lengths that steps leave in the long run.

    Args:
        counts: The placement.
        right: The chance that a draft is right up to its token number 0 (which is none), 1, 2, ...
        below: As in best_places.
        cost: As in best_places.
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
    plain_s, tokens, seconds, extra_s = cost(1), 0.0, 0.0, 0.0
    for length, chance in enumerate(chances):
        own_s, all_s = cost(1 + length), cost(1 + length + sum(counts[: length + 1]))
        tokens += chance * sum(right[: length + 1])
        seconds += chance * (below * own_s + (1 - below) * all_s)
        extra_s += chance * (1 - below) * (all_s - own_s)
    return Placed(counts, tokens * plain_s / seconds, extra_s / plain_s)
