"""Arithmetic on sparse distributions that the verification rules share."""

from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

from edgedec.sampling import Distribution


def point_mass(token: int) -> Distribution:
    """Return the distribution that holds one token."""
    return Distribution(np.array([token]), np.ones(1))


def probability(dist: Distribution, token: int) -> float:
    """Return the probability of one token."""
    place = int(np.searchsorted(dist.token_ids, token))
    found = place < len(dist.token_ids) and dist.token_ids[place] == token
    return float(dist.probs[place]) if found else 0.0


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
    kept = masses > 0
    return Distribution(p.token_ids[kept], masses[kept] / masses.sum()) if kept.any() else p


def residual(p: Distribution, q: Distribution, weight: float = 1.0) -> Distribution:
    """Return max(weight p - q, 0), rescaled: the distribution that replaces a rejected draw from q is drawn from.

    >>> half = Distribution(np.array([3, 4]), np.array([0.5, 0.5]))
    >>> residual(half, Distribution(np.array([4, 5]), np.array([0.75, 0.25]))).token_ids.tolist()
    [3]
    """
    return rescaled(p, excess(p, q, weight))


def without(q: Distribution, token: int) -> Distribution:
    """Return q without one of its tokens, rescaled; a point mass becomes an empty distribution."""
    kept = q.token_ids != token
    total = q.probs[kept].sum()
    return Distribution(q.token_ids[kept], q.probs[kept] / total if total > 0 else q.probs[kept])


def sample(dist: Distribution, number: float) -> int:
    """Return the token at which the distribution's running sum passes a number between 0 and 1."""
    # The last sum is left out: it may be rounded to below the number.
    return int(dist.token_ids[bisect_right(np.cumsum(dist.probs)[:-1], number)])
