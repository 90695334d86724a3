"""Operations over one whole row of logits: those of sampling, for which a runtime may have faster code, and momentum.

Momentum Decoding (Lan et al. 2022, "Momentum Decoding: Open-ended Text Generation As Graph Exploration",
arXiv:2212.02175) takes the token with the greatest p - strength * f(n). Here n is the number of tokens at the text's
end, the new one included, that stood in the text before, and f(n) = n from 2 to 5 tokens; a single token may come again
freely. The paper looks at the most probable few tokens; here every token competes, so that one that repeats nothing
always has a chance. The penalty is a function of the text alone, so drafts change nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

LEAST_REPEATED, MOST_REPEATED = 2, 5


@dataclass(frozen=True, slots=True)
class Total:
    """The softmax's denominator of a row.

    Attributes:
        most: The greatest logit.
        weight: The sum of exp(logit - most); the log-sum-exp is most + log(weight). Not a number where a logit is
            not finite.
    """

    most: float
    weight: float


class LogitOps(Protocol):
    """Operations on a row of logits, f32[n_vocab] and contiguous; returned token ids are int64[n], ascending."""

    def argmax(self, row: NDArray[np.float32]) -> int:
        """Return the most probable token, the lowest id on a tie."""

    def total(self, row: NDArray[np.float32]) -> Total:
        """Return the softmax's denominator."""

    def above(self, row: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
        """Return the tokens whose logit is at least `threshold`."""

    def top_k(self, row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Return the k (1 to n_vocab) most probable tokens; among equals at the border the lowest ids."""

    def nucleus(self, row: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
        """Return the fewest most probable tokens whose probabilities sum to at least `top_p` (0 to 1, not 1)."""

    def contenders(self, row: NDArray[np.float32], temperature: float, key: int) -> NDArray[np.int64]:
        """Return tokens among which is the argmax over all i of row[i] / temperature + gumbel(key, i)."""


class NumpyRowOps:
    """Implements LogitOps for any runtime."""

    def argmax(self, row: NDArray[np.float32]) -> int:
        """Return the most probable token."""
        return int(row.argmax())

    def total(self, row: NDArray[np.float32]) -> Total:
        """Return the softmax's denominator."""
        most = row.max()
        if not np.isfinite(most) or not np.isfinite(row.min()):
            return Total(float(most), float("nan"))
        return Total(float(most), float(np.exp((row - most).astype(np.float64)).sum()))

    def above(self, row: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
        """Return the tokens whose logit is at least `threshold`."""
        return np.flatnonzero(row >= np.float32(threshold))

    def top_k(self, row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Return the k most probable tokens."""
        border = np.partition(row, len(row) - k)[len(row) - k]
        above = np.flatnonzero(row > border)
        ties = np.flatnonzero(row == border)[: k - len(above)]
        return np.sort(np.concatenate([above, ties]))

    def nucleus(self, row: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
        """Return the nucleus; tokens with p <= (1 - top_p) / n sum to at most 1 - top_p and need no sorting."""
        ids = np.flatnonzero(row > -np.inf)
        scores = row[ids].astype(np.float64)
        weights = np.exp(scores - scores.max(initial=-np.inf))
        few = np.flatnonzero(weights > (1 - top_p) / max(1, len(ids)) * weights.sum())
        return np.sort(ids[few[nucleus(weights[few], top_p * weights.sum())]])

    def contenders(self, row: NDArray[np.float32], temperature: float, key: int) -> NDArray[np.int64]:
        """Return all tokens that can be drawn."""
        return np.flatnonzero(row > -np.inf)


def nucleus(weights: NDArray[np.float64], goal: float) -> NDArray[np.int64]:
    """Return the indices of the fewest largest weights that sum to `goal` (Holtzman et al. 2020, arXiv:1904.09751)."""
    order = np.argsort(-weights, kind="stable")
    n_kept = int(np.searchsorted(np.cumsum(weights[order]), goal)) + 1
    return order[:n_kept]


NUMPY_ROW_OPS = NumpyRowOps()


def entropy_of(row: NDArray[np.float32], ops: LogitOps) -> float:
    """Return the entropy in bits of the softmax of a row of logits, f32[n_vocab]; NaN where a logit is not finite.

    >>> entropy_of(np.zeros(8, np.float32), NUMPY_ROW_OPS)
    3.0
    """
    total = ops.total(row)
    if not math.isfinite(total.weight):
        return math.nan
    below = row - np.float32(total.most)
    mean = float((np.exp(below) * below).sum(dtype=np.float64)) / total.weight
    return max((math.log(total.weight) - mean) / math.log(2), 0.0)


def repeated_lengths(text: Sequence[int]) -> dict[int, int]:
    """Return, for each token that would repeat a stretch of the text, how many tokens that stretch has, from 2 to 5.

    >>> repeated_lengths([7, 8, 9, 5, 8, 7, 8])
    {7: 2, 9: 3}
    """
    ids = np.asarray(text, dtype=np.int64)
    if not len(ids):
        return {}
    longest: dict[int, int] = {}
    ends = np.flatnonzero(ids[:-1] == ids[-1])  # where the text's last n - 1 tokens end for another time
    for n in range(LEAST_REPEATED, MOST_REPEATED + 1):
        if not len(ends):
            break
        longest.update(dict.fromkeys(np.unique(ids[ends + 1]).tolist(), n))
        ends = ends[ends >= n - 1]
        ends = ends[ids[ends - n + 1] == ids[-n]] if n <= len(ids) else ends[:0]
    return longest


def slow_loops(scores: NDArray[np.float32], text: Sequence[int], strength: float) -> None:
    """Change a row of logits so that p becomes p - strength * n for each token that would repeat n tokens of the text.

    A token whose p is no more than that is ruled out; where this would rule out all, the one with the greatest
    p - strength * n stays alone.

    Args:
        scores: f32[n_vocab], changed in place; -inf rules a token out. p is their softmax.
        text: The token ids so far, the prompt included.
        strength: 0 changes nothing, 0.5 rules out whatever repeats two tokens.
    """
    lengths = {token: n for token, n in repeated_lengths(text).items() if token < len(scores)}
    possible = scores[scores > -np.inf]
    if not lengths or not len(possible) or not np.isfinite(most := possible.max()):
        return
    total = float(np.exp((possible - most).astype(np.float64)).sum())
    ids = np.fromiter(lengths, np.int64)
    before = scores[ids]
    p = np.exp(before.astype(np.float64) - float(most)) / total
    left = p - strength * np.fromiter(lengths.values(), np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores[ids] = np.where(left > 0, before + np.log(np.maximum(left, 0) / p), -np.inf)
    if scores.max() == -np.inf:
        best = int(np.where(before > -np.inf, left, -np.inf).argmax())
        scores[ids[best]] = before[best]
