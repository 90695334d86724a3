"""How probable each candidate of a table is to be the token that the target draws."""

import math
from collections.abc import Sequence

from edgedec.drafter import DraftContext
from edgedec.drafters.draft_builder import Child
from edgedec.sampling import gumbel_of

_LEAST_CANDIDATE = 0.01  # a candidate less probable than this is seldom the one drawn
_LEAST_TEMPERATURE = 1e-6
_EULER = 0.5772  # the mean of Gumbel noise


class Ranking:
    """Ranks the candidates after a context by P(the target draws this token at its position).

    At temperature 0 that is a candidate's share in the table. Above 0 the target takes the argmax of
    log p_i / T + G(seed, position, i). The noise G is known; log q_i, what the table says, estimates log p_i with an
    error. Where that error is Gumbel noise of scale `error`, P(i) is the softmax of (log q_i / T + G_i) / error, and
    the highest sum comes first, as in drafter-invariant coupling (Daliri, Musco and Suresh 2024, arXiv:2408.07978).
    Top-k, top-p, min-p, bias and penalties are left out.

    Args:
        context: The generation's: its temperature and its noise.
        error: The scale of the table's error.
        known: How often the text goes on as the table says where the table is certain.
    """

    def __init__(self, context: DraftContext, *, error: float, known: float) -> None:
        sampling = context.sampling
        self._noise = None if sampling.greedy else context.noise
        self._sharpness = 1.0 if sampling.greedy else 1.0 / max(sampling.temperature, _LEAST_TEMPERATURE)
        self._error = error
        self._known = known

    def rank(self, ids: Sequence[int], probs: Sequence[float], position: int) -> list[Child]:
        """Return the candidates as children, most probable first; improbable candidates are left out.

        Args:
            ids: The candidates.
            probs: Their probabilities at temperature 1, highest first; they sum to at most 1.
            position: The absolute position of the token in the text.
        """
        known = self._known
        if self._noise is None:
            return [(known * p, token, known * p) for token, p in zip(ids, probs, strict=True) if p >= _LEAST_CANDIDATE]
        key, sharpness = self._noise.key(position), self._sharpness
        scores = [
            (math.log(p) * sharpness + gumbel_of(key, token), token)
            for token, p in zip(ids, probs, strict=True)
            if p >= _LEAST_CANDIDATE
        ]
        if not scores:
            return []
        scores.sort(key=lambda score: -score[0])
        return self._shares(scores, 1 - sum(probs), probs[len(scores) - 1])

    def _shares(self, scores: list[tuple[float, int]], rest: float, least: float) -> list[Child]:
        """Turn noisy scores into probabilities.

        Args:
            scores: Score and token of each candidate, highest first.
            rest: The probability of all tokens outside the table; they compete for the draw, too.
            least: The probability of the least probable candidate, which bounds that of each token outside.
        """
        # Of tokens no more probable than `least` each, p^(1/T) sums to at most rest * least^(1/T - 1).
        outside = math.log(max(rest, 1e-3)) + (self._sharpness - 1) * math.log(least) + _EULER
        most = max(scores[0][0], outside)
        weights = [math.exp((score - most) / self._error) for score, _ in scores]
        total = sum(weights) + math.exp((outside - most) / self._error)
        scale = self._known / total
        return [(scale * w, token, scale * w) for w, (_, token) in zip(weights, scores, strict=True)]
