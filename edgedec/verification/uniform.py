"""Random numbers of a verification step, keyed by (seed, position, count)."""

from edgedec.noise import Noise
from edgedec.verification.contract import Uniform

_DOMAIN = 0x5665726966696572  # sets these numbers apart from the Gumbel noise of the same seed and position


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
