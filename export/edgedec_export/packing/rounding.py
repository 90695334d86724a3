"""Round weights to few bits, block by block.

The weights of a block are rounded to two grids of levels: one that spans the block's range, and a slightly narrower
one, which clips the largest weights (Banner et al. 2018, arXiv:1810.05723). For each, the scale is fitted to the
rounded levels by least squares, and the grid with the smaller error is taken.
"""

import numpy as np

from edgedec_export.packing.weights import Packed, pack_bits
from edgedec_runtimes.weights.levels import F32

_LEAST = np.finfo(np.float32).tiny
# The distances of levels to try, as parts of the distance at which they span a block's range.
_PARTS = {4: np.array([1.0, 0.9], np.float32), 8: np.ones(1, np.float32)}


def round_rows(weights: F32, bits: int, block: int) -> Packed:
    """Round rows, float32[n, n_in], to 4 bits with a zero point per block, or to 8 bits with all zero points 128.

    Args:
        block: Number of weights that share a scale; where it does not divide n_in, zeros fill the last block up.
    """
    n, n_in = weights.shape
    n_unused = -n_in % block
    if n_unused:
        weights = np.concatenate((weights, np.zeros((n, n_unused), np.float32)), axis=1)
    columns = np.ascontiguousarray(weights.reshape(-1, block).T)  # a block per column, as numpy sums fastest over rows
    width, zero = _grid(columns, bits)
    parts = _PARTS[bits]
    if len(parts) > 1:
        gains = [_fit(columns, width * part, zero, bits)[2] for part in parts]
        width *= parts[np.argmax(gains, axis=0)]
    k, scale, _ = _fit(columns, width, zero, bits)
    k += zero
    q = np.ascontiguousarray(k.astype(np.uint8).T).reshape(n, -1, block)
    zero_points = None if bits == 8 else pack_bits(zero.astype(np.uint8).reshape(n, -1), bits)
    return Packed(bits, block, pack_bits(q, bits), scale.reshape(n, -1), zero_points, n_unused=n_unused)


def _grid(columns: F32, bits: int) -> tuple[F32, F32]:
    """Return per block the distance of levels that span the block's range, and its zero point, float32[n] each."""
    low, high = np.minimum(columns.min(axis=0), 0), np.maximum(columns.max(axis=0), 0)
    if bits == 8:
        return np.maximum(high, -low) / np.float32(127), np.full(len(low), 128, np.float32)
    width = (high - low) / np.float32(2**bits - 1)
    return width, np.rint(_quotient(-low, width))


def _fit(columns: F32, width: F32, zero: F32, bits: int) -> tuple[F32, F32, F32]:
    """Round blocks, float32[block, n], to multiples of a width, float32[n], and fit their scales to the result.

    Returns:
        k: float32[block, n], integers from -zero to 2^bits - 1 - zero.
        scale: float32[n], for which k * scale is closest to the block.
        gain: float32[n], how much closer that is than zeros are, as a sum of squares.
    """
    k = columns * _quotient(np.ones_like(width), width)
    np.rint(k, out=k)
    np.maximum(k, -zero, out=k)
    np.minimum(k, np.float32(2**bits - 1) - zero, out=k)
    products = columns * k
    with_weights = products.sum(axis=0)
    squares = np.multiply(k, k, out=products).sum(axis=0)
    scale = _quotient(with_weights, squares)
    return k, scale, with_weights * scale


def _quotient(numerator: F32, denominator: F32) -> F32:
    """Divide element by element; the result is 0 where the denominator is 0 or nearly 0."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > _LEAST)
