"""An orthogonal rotation of the hidden states, folded into the weights, after which no element is far above the rest.

A few elements of hidden states are thousands of times larger than the others (Sun et al. 2024, arXiv:2402.17762); in 16
bits with one scale, few levels would be left for the others. Norms commute with rotations once their own weights are
part of the matrices behind them. So rotating what is written to the hidden state and what is read from it changes no
result (Ashkboos et al. 2024, arXiv:2404.00456).

The rotation is a Hadamard matrix for the powers of two in the length, a cosine transform for the rest, and random
signs before both.
"""

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]


def rotate(rows: F32) -> F32:
    """Return rows, float32[..., n], rotated: their lengths and their products with each other do not change.

    >>> rows = np.eye(48, dtype=np.float32)
    >>> turned = rotate(rows)
    >>> bool(np.allclose(turned @ turned.T, rows, atol=1e-6)), bool(np.abs(turned).max() < 0.21)
    (True, True)
    """
    n = rows.shape[-1]
    power = n & -n
    signs = np.random.default_rng(n).choice(np.array([-1, 1], np.float32), n)
    grid: F32 = (rows * signs).astype(np.float32).reshape(-1, power, n // power)
    turned: F32 = np.matmul(np.matmul(_hadamard(power), grid), _cosines(n // power))
    return turned.reshape(rows.shape)


def _hadamard(n: int) -> F32:
    """Return the orthogonal Hadamard matrix, float32[n, n], for n a power of two: entries are ±1/sqrt(n)."""
    matrix = np.full((1, 1), 1 / np.sqrt(n))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return matrix.astype(np.float32)


def _cosines(n: int) -> F32:
    """Return the orthogonal cosine transform, float32[n, n]."""
    waves = np.cos(np.pi / n * (np.arange(n)[:, None] + 0.5) * np.arange(n))
    waves[:, 0] /= np.sqrt(2)
    scaled: NDArray[np.float64] = waves * np.sqrt(2 / n)
    return scaled.astype(np.float32)
