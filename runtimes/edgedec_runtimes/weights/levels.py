"""The weights of ggml's tensors as floats, and the levels of its quantized blocks: integers, scales and minimums.

`dequantize` returns weights as floats; it also takes the types of `coded_values`. `LEVELS` returns a block's integers,
scales and minimums, for an export that keeps them.

The layouts are those of ggml-common.h. The scale of a super-block and that of a block in it are multiplied in float32,
which is exact: the first has 11 bits, the second at most 7.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import FLOATS, GGUF, floats
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.weights.coded_values import VALUES, half

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Levels:
    """Blocks of weights. A weight is (q - zero) * scale - minimum.

    Attributes:
        q: uint8[n, n_blocks, block], below n_levels.
        n_levels: 16, 32, 64 or 256.
        zero: The level that stands for 0; 0 where there are minimums.
        scales: float32[n, n_blocks].
        minimums: float32[n, n_blocks], or None where the type has none.
    """

    q: U8
    n_levels: int
    zero: int
    scales: F32
    minimums: F32 | None = None

    def by_row(self, n_rows: int) -> "Levels":
        """Return the same blocks, arranged as n_rows rows of a matrix."""
        block = self.q.shape[2]
        minimums = None if self.minimums is None else self.minimums.reshape(n_rows, -1)
        q, scales = self.q.reshape(n_rows, -1, block), self.scales.reshape(n_rows, -1)
        return Levels(q, self.n_levels, self.zero, scales, minimums)

    def values(self) -> F32:
        """Return the weights, float32[n, n_blocks * block], each rounded once."""
        weights = self.q.astype(np.float32)
        weights -= np.float32(self.zero)
        with np.errstate(all="ignore"):
            weights *= self.scales[..., None]
            if self.minimums is not None:
                weights -= self.minimums[..., None]
        return weights.reshape(len(weights), -1)


def _halves_of_bytes(data: U8) -> U8:
    """Return the low four bits of all bytes along the last axis, then the high four bits of all."""
    n = data.shape[-1]
    halves = np.empty((*data.shape[:-1], 2 * n), np.uint8)
    np.bitwise_and(data, 15, out=halves[..., :n])
    np.right_shift(data, 4, out=halves[..., n:])
    return halves


def _five_bits(data: U8) -> U8:
    """Return uint8[n, 32]: numbers of five bits, from 4 bytes of highest bits and 16 bytes of low ones."""
    low = _halves_of_bytes(data[:, 4:])
    low |= np.unpackbits(data[:, :4], axis=1, bitorder="little") << np.uint8(4)
    return low


def _k_scales(blocks: U8) -> tuple[F32, F32]:
    """Return scales and minimums of the 8 blocks of a super-block, float32[n, 8] each.

    Bytes 4 to 15 hold 6 bits of each number. Those of the first four blocks are in bytes 4 to 7 and 8 to 11; those of
    the last four are in the halves of bytes 12 to 15, with their two highest bits above the numbers of the first four.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate((first & 63, third & 15 | first >> 6 << 4), axis=1)
    minimums = np.concatenate((second & 63, third >> 4 | second >> 6 << 4), axis=1)
    return half(blocks, 0) * scales, half(blocks, 2) * minimums


def _q4_k(blocks: U8) -> Levels:
    q = _halves_of_bytes(blocks[:, 16:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    return Levels(q, 16, 0, *_k_scales(blocks))


def _q5_k(blocks: U8) -> Levels:
    q = _halves_of_bytes(blocks[:, 48:].reshape(-1, 4, 32)).reshape(-1, 8, 32)
    for i in range(8):  # block i's fifth bits are bit i of 32 bytes
        q[:, i] |= (blocks[:, 16:48] >> np.uint8(i) & 1) << np.uint8(4)
    return Levels(q, 32, 0, *_k_scales(blocks))


def _q6_k(blocks: U8) -> Levels:
    """Return levels of 16 blocks of 16. Per half: 64 bytes of low bits, 32 bytes with two high bits of four blocks."""
    q = _halves_of_bytes(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 2, 4, 32)
    high = blocks[:, 128:192].reshape(-1, 2, 32)
    for i in range(4):
        q[:, :, i] |= (high >> np.uint8(2 * i) & 3) << np.uint8(4)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return Levels(q.reshape(-1, 16, 16), 64, 32, half(blocks, 208) * scales)


LEVELS: dict[GGMLType, Callable[[U8], Levels]] = {
    GGMLType.Q4_0: lambda b: Levels(_halves_of_bytes(b[:, None, 2:]), 16, 8, half(b, 0)),
    GGMLType.Q4_1: lambda b: Levels(_halves_of_bytes(b[:, None, 4:]), 16, 0, half(b, 0), -half(b, 2)),
    GGMLType.Q5_0: lambda b: Levels(_five_bits(b[:, 2:])[:, None], 32, 16, half(b, 0)),
    GGMLType.Q5_1: lambda b: Levels(_five_bits(b[:, 4:])[:, None], 32, 0, half(b, 0), -half(b, 2)),
    GGMLType.Q8_0: lambda b: Levels((b[:, 2:] ^ np.uint8(128))[:, None], 256, 128, half(b, 0)),
    GGMLType.Q4_K: _q4_k,
    GGMLType.Q5_K: _q5_k,
    GGMLType.Q6_K: _q6_k,
}
"""By type, a function from blocks, uint8[n, block_bytes], to levels (a block of types without super-blocks is one)."""


def dequantize(kind: GGMLType, rows: U8) -> F32:
    """Return float32[n_rows, n_columns] for uint8[n_rows, row_bytes], rows of one tensor as a file holds them.

    Raises:
        UnsupportedModelError: edgedec does not take the type apart.
    """
    if kind in FLOATS:
        return floats(kind, np.ascontiguousarray(rows))
    if kind not in LEVELS and kind not in VALUES:
        ggml_type = ", ".join(sorted(ggml_type.name for ggml_type in (*FLOATS, *LEVELS, *VALUES)))
        raise UnsupportedModelError(
            f"the tensor type is {kind.name}, expected one of {ggml_type}; take the file in another quantization"
        )
    blocks = np.ascontiguousarray(rows).reshape(-1, kind.block_bytes)
    if kind in VALUES:
        with np.errstate(all="ignore"):  # as in Levels.values
            return VALUES[kind](blocks).reshape(len(rows), -1)
    return LEVELS[kind](blocks).values().reshape(len(rows), -1)


def read_rows(gguf: GGUF, name: str, first: int, n_rows: int) -> F32:
    """Return float32[n_rows, n_columns], rows of a matrix of a file (raises what dequantize and reading raise)."""
    tensor = gguf.tensors[name]
    row_bytes = tensor.n_bytes // (tensor.n_elements // tensor.shape[0])
    data = np.frombuffer(gguf.read_tensor_bytes(name, first * row_bytes, n_rows * row_bytes), np.uint8)
    return dequantize(tensor.type, data.reshape(n_rows, row_bytes))
