"""What verification rules are written with: random numbers, arithmetic on sparse distributions, and a walk."""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, Verification
from edgedec.errors import PluginError
from edgedec.sampling import Distribution, Noise

_DOMAIN = 0x5665726966696572  # sets these numbers apart from the Gumbel noise of the same seed and position

Uniform = Callable[[int], float]
"""`k` -> the k-th random number of this step, above 0 and below 1."""

DrawToken = Callable[[int, tuple[int, ...], Sequence[int]], int]


def uniform_source(noise: Noise, position: int) -> Uniform:
    """Return `k` -> the k-th random number, above 0 and below 1, of the step whose first new token is at `position`.

    Every step adds a token, so no two steps of a text share a position. The numbers are independent of the Gumbel noise
    that drafters under the coupled rule draw with.

    >>> uniform = uniform_source(Noise(1), 7)
    >>> uniform(0) == uniform(0), uniform(0) == uniform(1)
    (True, False)
    """
    words = Noise(noise.key(position) ^ _DOMAIN)
    return lambda k: ((words.key(k) >> 12) + 0.5) * 2.0**-52


def in_turn(uniform: Uniform) -> Iterator[float]:
    """Yield the random numbers of a step, one after the other."""
    return map(uniform, count())


def laws_of(draft: Draft, q: Sequence[Distribution | None]) -> list[Distribution]:
    """Return the distribution that each node was drawn from: its q, or a point mass for a node that was looked up.

    Raises:
        PluginError: q has not one entry for each node, or a node holds a token that its q rules out.
    """
    if len(q) != len(draft):
        raise PluginError(
            f"a draft of {len(draft)} nodes came with {len(q)} distributions in q; q must have one for each node"
        )
    laws = []
    for node, (token, law) in enumerate(zip(draft.tokens, q, strict=True)):
        if law is not None and probability(law, token) == 0:
            raise PluginError(
                f"node {node} holds token {token}, which its q gives the probability 0; q must be the distribution "
                "that the token was drawn from"
            )
        laws.append(point_mass(token) if law is None else law)
    return laws


def point_mass(token: int) -> Distribution:
    """Return the distribution that holds one token."""
    return Distribution(np.array([token]), np.ones(1))


def probability(dist: Distribution, token: int) -> float:
    """Return the probability of one token."""
    place = int(np.searchsorted(dist.token_ids, token))
    holds = place < len(dist.token_ids) and dist.token_ids[place] == token
    return float(dist.probs[place]) if holds else 0.0


def probabilities(dist: Distribution, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return f64[n], the probabilities of these tokens."""
    if not len(dist.token_ids):
        return np.zeros(len(token_ids))
    places = np.minimum(np.searchsorted(dist.token_ids, token_ids), len(dist.token_ids) - 1)
    return np.where(dist.token_ids[places] == token_ids, dist.probs[places], 0.0)


def excess(p: Distribution, q: Distribution, weight: float = 1.0) -> NDArray[np.float64]:
    """Return f64[n], max(weight p - q, 0) at the tokens of p."""
    return np.maximum(weight * p.probs - probabilities(q, p.token_ids), 0.0)


def rescaled(p: Distribution, masses: NDArray[np.float64]) -> Distribution:
    """Return these masses (f64[n], at the tokens of p) as a distribution.

    Where all are 0, which only rounding can bring about, p itself is returned.
    """
    positive = masses > 0
    return Distribution(p.token_ids[positive], masses[positive] / masses.sum()) if positive.any() else p


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """Return max(weight p - q, 0), rescaled: the distribution that replaces a rejected draw from q is drawn from.

    >>> half = Distribution(np.array([3, 4]), np.array([0.5, 0.5]))
    >>> residual(half, Distribution(np.array([4, 5]), np.array([0.75, 0.25]))).token_ids.tolist()
    [3]
    """
    return rescaled(p, excess(p, q, weight))


def without(q: Distribution, token: int) -> Distribution:
    """Return q without one of its tokens, rescaled; a point mass becomes an empty distribution."""
    others = q.token_ids != token
    total = q.probs[others].sum()
    return Distribution(q.token_ids[others], q.probs[others] / total if total > 0 else q.probs[others])


def sample(dist: Distribution, number: float) -> int:
    """Return the token at which the distribution's running sum passes a number between 0 and 1."""
    # The last sum is left out: it may be rounded to below the number.
    return int(dist.token_ids[bisect_right(np.cumsum(dist.probs)[:-1], number)])


def walk(draft: Draft, draw_token: DrawToken) -> Verification:
    """Accept nodes from the root on, for as long as some node holds the token that is drawn: token by token.

    Where several nodes have the same text, the children of all of them are the next candidates.

    Args:
        draft: What was proposed.
        draw_token: `(row, accepted tokens, candidates)` -> the next token, drawn from p at that row with the help of
            the nodes that propose one. It is called once for a row, in order.

    Of two chains, 5 6 and 5 7, the second is accepted:

    >>> draft = Draft.tree([5, 6, 5, 7], [-1, 0, -1, 2], [1, 1, 1, 1])
    >>> walk(draft, lambda row, accepted, candidates: (5, 7, 9)[len(accepted)])
    Verification(path=(2, 3), token_ids=(5, 7, 9), candidates=None)
    """
    children = children_of(draft)
    standing = [-1]
    token_ids: tuple[int, ...] = ()
    while True:
        candidates = [child for node in standing for child in children[node]]
        token_ids += (draw_token(standing[0] + 1, token_ids, candidates),)
        following = [node for node in candidates if draft.tokens[node] == token_ids[-1]]
        if not following:
            return Verification(path_to(draft, standing[0]), token_ids)
        standing = following


def children_of(draft: Draft) -> dict[int, list[int]]:
    """Return the children of each node and, under -1, the roots, in the order of the draft."""
    children: dict[int, list[int]] = {node: [] for node in range(-1, len(draft))}
    for node, parent in enumerate(draft.parents):
        children[parent].append(node)
    return children


def path_to(draft: Draft, node: int) -> tuple[int, ...]:
    """Return the nodes from the root to `node`, that one included; none for -1."""
    path: tuple[int, ...] = ()
    while node >= 0:
        path = (node, *path)
        node = int(draft.parents[node])
    return path
