"""Momentum Decoding: tokens that would repeat a stretch of the text become less probable (Lan et al. 2022).

The paper ("Momentum Decoding: Open-ended Text Generation As Graph Exploration", arXiv:2212.02175) takes the token with
the greatest p - strength * f(n). Here n is the number of tokens at the text's end, the new one included, that stood in
the text before, and f(n) = n from 2 to 5 tokens; a single token may come again freely. The paper looks at the most
probable few tokens; here every token competes, so that one that repeats nothing always has a chance.

The penalty is a function of the text alone, so drafts change nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

LEAST_REPEATED, MOST_REPEATED = 2, 5


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
    found = {token: n for token, n in repeated_lengths(text).items() if token < len(scores)}
    possible = scores[scores > -np.inf]
    if not found or not len(possible) or not np.isfinite(most := possible.max()):
        return
    total = float(np.exp((possible - most).astype(np.float64)).sum())
    ids = np.fromiter(found, np.int64)
    before = scores[ids]
    p = np.exp(before.astype(np.float64) - float(most)) / total
    left = p - strength * np.fromiter(found.values(), np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        scores[ids] = np.where(left > 0, before + np.log(np.maximum(left, 0) / p), -np.inf)
    if scores.max() == -np.inf:
        best = int(np.where(before > -np.inf, left, -np.inf).argmax())
        scores[ids[best]] = before[best]
