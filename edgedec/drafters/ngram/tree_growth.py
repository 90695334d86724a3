"""Draft trees from tables of candidates: the most probable paths first, and children drawn with the target's noise."""

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from edgedec.draft import Draft
from edgedec.drafters.ngram.table import BITS
from edgedec.noise import Noise, gumbel_of
from edgedec.sampling import SamplingParams

# A child's score, which decides where the tree grows; its token; P(accepted | parent accepted).
Child = tuple[float, int, float]
Children = Callable[[int, int], Sequence[Child]]

LEAST_PATH = 0.005  # a path less probable than this is not worth a row
_LEAST_CANDIDATE = 0.01  # a candidate less probable than this is seldom the one drawn
_LEAST_TEMPERATURE = 1e-6
_EULER = 0.5772  # what Gumbel noise is on average


def grow(state: int, n_tokens: int, n_max: int, children: Children) -> Draft:
    """Grow a tree of at most `n_max` nodes, highest product of scores along a path first.

    Args:
        state: The text's last tokens, BITS bits each.
        n_tokens: How many tokens a state holds.
        n_max: Most nodes.
        children: `(state, depth)` -> the tokens that may follow, highest score first, none twice.
    """
    mask = (1 << BITS * n_tokens) - 1
    tokens: list[int] = []
    parents: list[int] = []
    p_accept: list[float] = []
    # minus the path's score, order of arrival, siblings, which of them, parent, its state, its path's score, depth
    queue: list[tuple[float, int, Sequence[Child], int, int, int, float, int]] = []
    order = 0
    first = children(state, 0)
    if first and n_max > 0:
        queue.append((-first[0][0], 0, first, 0, -1, state, 1.0, 0))
    while queue:
        negative, _, siblings, rank, parent, before, path, depth = heappop(queue)
        _, token, p = siblings[rank]
        node = len(tokens)
        after = ((before << BITS) | token) & mask
        tokens.append(token)
        parents.append(parent)
        p_accept.append(p)
        if node + 1 == n_max:
            break
        rank += 1
        if rank < len(siblings) and path * siblings[rank][0] >= LEAST_PATH:
            order += 1
            heappush(queue, (-path * siblings[rank][0], order, siblings, rank, parent, before, path, depth))
        below = children(after, depth + 1) if -negative >= LEAST_PATH else ()
        if below and -negative * below[0][0] >= LEAST_PATH:
            order += 1
            heappush(queue, (negative * below[0][0], order, below, 0, node, after, -negative, depth + 1))
    return Draft.tree(tokens, parents, p_accept)


class Ranking:
    """How probable each candidate is to be the token that the target takes at a position.

    At temperature 0 that is its share. Above 0 the target takes argmax of log p_i / T + G(seed, position, i): the noise
    is known, only the error of log q_i as an estimate of log p_i is not. Where that error is Gumbel noise of scale
    `error`, P(i) is the softmax of (log q_i / T + G_i) / error, and the highest sum comes first, as
    in drafter-invariant coupling (Daliri, Musco and Suresh 2024, arXiv:2408.07978). Top-k, top-p, min-p, bias and
    penalties are left out.

    `known` is how often the text goes on as the table says where the table is certain.
    """

    def __init__(self, sampling: SamplingParams, noise: Noise, *, error: float, known: float) -> None:
        self._noise = None if sampling.greedy else noise
        self._sharpness = 1.0 if sampling.greedy else 1.0 / max(sampling.temperature, _LEAST_TEMPERATURE)
        self._error = error
        self._known = known

    def rank(self, ids: Sequence[int], probs: Sequence[float], position: int) -> list[Child]:
        """Return children, most probable first.

        Args:
            ids: Candidates.
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
        """Turn noisy scores into probabilities; tokens outside the table compete with what they leave to them."""
        # Of tokens no more probable than `least` each, p^(1/T) sums to at most rest * least^(1/T - 1).
        outside = math.log(max(rest, 1e-3)) + (self._sharpness - 1) * math.log(least) + _EULER
        most = max(scores[0][0], outside)
        weights = [math.exp((score - most) / self._error) for score, _ in scores]
        total = sum(weights) + math.exp((outside - most) / self._error)
        scale = self._known / total
        return [(scale * w, token, scale * w) for w, (_, token) in zip(weights, scores, strict=True)]
