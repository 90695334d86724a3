"""Encode a checkpoint's numbers as bytes of a GGUF: F32, F16, BF16, and Q8_0 rounded as ggml does."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.tensor_types import GGMLType

_LARGEST_F16 = 65504.0
_Q8_BLOCK = 32


def quantize_q8_0(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Round float32[..., 32 k] to uint8[n_blocks, 34]: a scale in float16, then 32 int8.

    The scale is the largest magnitude / 127. Quotients are rounded to nearest, halves away from zero, as in ggml's
    quantize_row_q8_0_ref.
    """
    blocks = values.reshape(-1, _Q8_BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)
    x = blocks * inverse
    magnitude = np.abs(x)
    whole = np.floor(magnitude)
    rounded = np.copysign(whole + (magnitude - whole >= np.float32(0.5)), x)
    out = np.empty((len(blocks), 2 + _Q8_BLOCK), np.uint8)
    out[:, :2] = to_f16(scale).view(np.uint8)
    out[:, 2:] = rounded.astype(np.int8).view(np.uint8)
    return out


def to_f16(values: NDArray[np.float32]) -> NDArray[np.float16]:
    """Round to float16; raises UnsupportedModelError for a number beyond its range, or NaN."""
    if not np.abs(values).max(initial=0) <= _LARGEST_F16:
        raise UnsupportedModelError(
            f"the checkpoint holds NaN or numbers beyond {_LARGEST_F16:.0f}, the largest of float16; convert it to "
            "BF16 or F32"
        )
    return values.astype("<f2")


def _bf16(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Round to the nearest bfloat16, halves to even."""
    bits = values.view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")


ENCODERS: dict[GGMLType, Callable[[NDArray[np.float32]], bytes]] = {
    GGMLType.F32: lambda values: values.astype("<f4").tobytes(),
    GGMLType.F16: lambda values: to_f16(values).tobytes(),
    GGMLType.BF16: lambda values: _bf16(np.ascontiguousarray(values)).tobytes(),
    GGMLType.Q8_0: lambda values: quantize_q8_0(values).tobytes(),
}
"""By type: a function from float32[..., n], rows of whole blocks, to the bytes of a tensor.

F16 and Q8_0 raise UnsupportedModelError for a number that is beyond float16's range, or NaN.
"""
