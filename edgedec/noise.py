"""Random numbers keyed by (seed, position, token id): the noise that the target's tokens are drawn with.

The generator is SplitMix64 (Steele, Lea and Flood 2014). Seed and position are hashed to its starting state; the number
of token i is the one after i + 1 steps, computed without the steps before.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEED_LIMIT = 2**64
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Noise:
    """Gumbel noise as a pure function of (seed, position, token id)."""

    seed: int

    def key(self, position: int) -> int:
        """Return the 64-bit key of an absolute position of the sequence."""
        return _mix(_mix(self.seed % SEED_LIMIT) ^ position)

    def gumbel(self, position: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return f64[n], the noise of these tokens at an absolute position of the sequence."""
        return gumbel(self.key(position), token_ids)


def gumbel(key: int, token_ids: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return f64[n], the noise of these tokens under a position's key."""
    x = (token_ids.astype(np.uint64) + np.uint64(1)) * np.uint64(_GAMMA) + np.uint64(key)  # wraps around as intended
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FIRST)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_SECOND)
    x ^= x >> np.uint64(31)
    # 52 bits, so that the half is exact and no value rounds to 0 or 1.
    uniform = ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52
    return -np.log(-np.log(uniform))


def gumbel_of(key: int, token_id: int) -> float:
    """Return what gumbel() returns for one token; for single tokens this is faster than arrays."""
    word = _mix((token_id * _GAMMA + key) % SEED_LIMIT)
    return -math.log(-math.log(((word >> 12) + 0.5) * 2.0**-52))


def _mix(x: int) -> int:
    """Scramble a 64-bit word, one to one."""
    x = (x + _GAMMA) % SEED_LIMIT
    x = (x ^ (x >> 30)) * _FIRST % SEED_LIMIT
    x = (x ^ (x >> 27)) * _SECOND % SEED_LIMIT
    return x ^ (x >> 31)
