"""What drafting with a head would bring: its drafts on known texts, replayed under a cost curve."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_THRESHOLDS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.8)


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What a head drafts on one text; a draft may begin after each of n tokens.

    Attributes:
        kind: The kind of prompt.
        right: bool[n, K], whether the draft's token number k after token i is the text's, given that those before are.
        sure: f32[n, K], the head's probability of that token.
    """

    kind: str
    right: NDArray[np.bool_]
    sure: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a way to draft gives.

    Attributes:
        n_most: Most tokens of a draft.
        least_sure: A draft ends before the token with which the product of the head's probabilities falls below this.
        tokens_per_step: Tokens that a step adds.
        drafted_per_step: Tokens that it drafts.
        speed: How many times as fast as plain decoding the text is written.
    """

    n_most: int
    least_sure: float
    tokens_per_step: float
    drafted_per_step: float
    speed: float


Costs = Callable[[int], float]
"""The time of a step in which so many tokens are drafted, maybe none, in plain steps."""


def replay(texts: Iterable[Drafted], costs: Costs, n_most: int, least_sure: float = 0.0) -> Outcome:
    """Return what chains of at most `n_most` tokens bring on texts."""
    n_steps = n_tokens = n_drafted = 0
    seconds = 0.0
    for text in texts:
        path = np.cumprod(text.sure[:, :n_most], axis=1)
        lengths = (path >= least_sure).cumprod(axis=1).sum(axis=1)
        accepted = np.minimum(text.right[:, :n_most].cumprod(axis=1).sum(axis=1), lengths)
        i = 0
        while i < len(lengths):
            n, n_accepted = min(int(lengths[i]), len(lengths) - i), int(accepted[i])
            n_steps, n_drafted, seconds = n_steps + 1, n_drafted + n, seconds + costs(n)
            n_tokens, i = n_tokens + min(n_accepted + 1, len(lengths) - i), i + n_accepted + 1
    if not n_steps:
        return Outcome(n_most, least_sure, 1.0, 0.0, 1.0)
    return Outcome(n_most, least_sure, n_tokens / n_steps, n_drafted / n_steps, n_tokens / seconds)


def best_outcome(texts: Sequence[Drafted], costs: Costs) -> Outcome:
    """Return the fastest way to draft on texts, over lengths and thresholds; with drafts of no token if none pays."""
    n_most = max((text.right.shape[1] for text in texts), default=0)
    plain = Outcome(0, 0.0, 1.0, 0.0, 1.0)
    ways = (replay(texts, costs, n, least) for n in range(1, n_most + 1) for least in _THRESHOLDS)
    return max((plain, *ways), key=lambda outcome: outcome.speed)


def reach(texts: Sequence[Drafted], n_most: int) -> tuple[float, ...]:
    """Return the chance that a draft is accepted up to its first, second, ... token, over drafts of `n_most` tokens.

    Drafts begin where steps would: after the token that follows an accepted draft.
    """
    counts, n_steps = np.zeros(n_most + 1), 0
    for text in texts:
        accepted = text.right[:, :n_most].cumprod(axis=1).sum(axis=1)
        i = 0
        while i < len(accepted):
            counts[: accepted[i] + 1] += 1
            n_steps, i = n_steps + 1, i + int(accepted[i]) + 1
    return tuple((counts[1:] / max(1, n_steps)).tolist())
