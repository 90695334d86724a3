"""The weights of ggml's types of few bits as floats: Q2_K, Q3_K, IQ4_NL, IQ4_XS, MXFP4, TQ2_0, Q2_0, Q1_0.

The layouts and the levels are those of ggml-common.h. Types with a look-up grid are not taken apart here.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.tensor_types import GGMLType

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]

_FOUR_BITS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
_E2M1 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)  # doubled


def half(blocks: U8, at: int) -> F32:
    """Return float32[n, 1]: the float16 number at byte `at` of each block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(data: U8) -> U8:
    """Return uint8[n, n_blocks, 32] for blocks of 16 bytes: the low halves, then the high ones."""
    blocks = data.reshape(len(data), -1, 16)
    return np.concatenate([blocks & 15, blocks >> 4], axis=2)


def _two_bits(data: U8) -> U8:
    """Return uint8[n, 8, 32]: bits 2 i and 2 i + 1 of each 32 bytes are block i of four."""
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    return (data.reshape(-1, 2, 1, 32) >> shifts & np.uint8(3)).reshape(-1, 8, 32)


def _in_order(data: U8, n_bits: int) -> U8:
    """Return uint8[n, 1, codes]: codes of 1 or 2 bits, the first ones in the low bits of a byte."""
    shifts = np.arange(0, 8, n_bits, dtype=np.uint8)
    return (data[..., None] >> shifts & np.uint8(2**n_bits - 1)).reshape(len(data), 1, -1)


def _q2_k(blocks: U8) -> F32:
    scales, q = blocks[:, :16], _two_bits(blocks[:, 16:80]).reshape(-1, 16, 16).astype(np.float32)
    low, high = (scales & 15).astype(np.float32), (scales >> 4).astype(np.float32)
    return (half(blocks, 80) * low)[..., None] * q - (half(blocks, 82) * high)[..., None]


def _q3_k(blocks: U8) -> F32:
    low, two = blocks[:, 96:104], blocks[:, 104:108]
    high = np.concatenate([two >> shift & 3 for shift in (0, 2, 4, 6)], axis=1)
    scales: F32 = (np.concatenate([low & 15, low >> 4], axis=1) | high << 4).astype(np.float32) - 32
    thirds = blocks[:, None, :32] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    q: F32 = (_two_bits(blocks[:, 32:96]) | thirds << 2).astype(np.float32) - 4
    return (half(blocks, 108) * scales)[..., None] * q.reshape(-1, 16, 16)


def _iq4_xs(blocks: U8) -> F32:
    pairs = blocks[:, 4:8]
    low = np.stack([pairs & 15, pairs >> 4], axis=2).reshape(-1, 8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16) & 3
    scales: F32 = (low | high << 4).astype(np.float32) - 32
    return (half(blocks, 0) * scales)[..., None] * _FOUR_BITS[_nibbles(blocks[:, 8:])]


def _mxfp4(blocks: U8) -> F32:
    scales: F32 = np.ldexp(np.float32(1), blocks[:, :1].astype(np.int32) - 128)
    return scales[..., None] * _E2M1[_nibbles(blocks[:, 1:])]


VALUES: dict[GGMLType, Callable[[U8], F32]] = {
    GGMLType.Q2_K: _q2_k,
    GGMLType.Q3_K: _q3_k,
    GGMLType.IQ4_NL: lambda b: half(b, 0)[..., None] * _FOUR_BITS[_nibbles(b[:, 2:])],
    GGMLType.IQ4_XS: _iq4_xs,
    GGMLType.MXFP4: _mxfp4,
    GGMLType.Q1_0: lambda b: half(b, 0)[..., None] * (2 * _in_order(b[:, 2:], 1).astype(np.float32) - 1),
    GGMLType.Q2_0: lambda b: half(b, 0)[..., None] * (_in_order(b[:, 2:], 2).astype(np.float32) - 1),
    GGMLType.TQ2_0: lambda b: half(b, 64)[..., None] * (_two_bits(b[:, :64]).astype(np.float32) - 1),
}
"""By type, a function from blocks, uint8[n, block_bytes], to weights, float32[n, n_blocks, block]."""
