"""Round floats to ggml's types with blocks of 32: Q4_0 with the scale that loses least, Q8_0 as ggml does.

`BLOCK_ENCODERS` adds Q4_0 to the types of hf/types.py. ggml's own Q4_0 takes the largest magnitude of a block for the
level -8. Trying smaller and larger scales around that one costs a second for ten million weights, and takes about a
tenth of the squared error away.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType
from edgedec_export.hf.types import ENCODERS, to_f16

_BLOCK = 32
_FACTORS = tuple(np.float32(factor) for factor in (1.0, 0.88, 0.91, 0.94, 0.97, 1.03, 1.06, 1.09, 1.12))
_BLOCKS_AT_ONCE = 1 << 14


def quantize_q4_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round float32[..., 32 k] to uint8[n_blocks, 18]: a scale in float16, then 32 levels of 4 bits.

    Level q stands for (q - 8) * scale. Of the scales that were tried, each block gets the one with the least squared
    error.

    Raises:
        UnsupportedModelError: A number is beyond float16's range, or NaN.
    """
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, _BLOCK)
    parts = [_q4_0(blocks[i : i + _BLOCKS_AT_ONCE]) for i in range(0, len(blocks), _BLOCKS_AT_ONCE)]
    return np.concatenate(parts)


def _q4_0(blocks: NDArray[np.float32]) -> NDArray[np.uint8]:
    extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1)[:, None], axis=1) / np.float32(-8)
    best_scale = to_f16(extreme)
    best, least = _levels(blocks, best_scale)
    for factor in _FACTORS[1:]:
        scale = to_f16(extreme * factor)
        levels, error = _levels(blocks, scale)
        better = error < least
        best[better], best_scale[better], least[better] = levels[better], scale[better], error[better]
    out = np.empty((len(blocks), 2 + _BLOCK // 2), np.uint8)
    out[:, :2] = best_scale.view(np.uint8)
    out[:, 2:] = best[:, : _BLOCK // 2] | best[:, _BLOCK // 2 :] << np.uint8(4)
    return out


def _levels(blocks: NDArray[np.float32], scale: NDArray[np.float16]) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Return the nearest levels, uint8[n, 32], and the squared error of each block, float32[n]."""
    wide = scale.astype(np.float32)
    inverse = np.divide(np.float32(1), wide, out=np.zeros_like(wide), where=wide != 0)
    q = np.clip(np.rint(blocks * inverse), -8, 7)
    error: NDArray[np.float32] = np.square(q * wide - blocks).sum(axis=1)
    return (q + 8).astype(np.uint8), error


BLOCK_ENCODERS: dict[GGMLType, Callable[[NDArray[np.float32]], bytes]] = ENCODERS | {
    GGMLType.Q4_0: lambda values: quantize_q4_0(values).tobytes(),
}
"""By type: a function from float32[..., n], rows of whole blocks, to the bytes of a tensor."""
