"""Matrices in the layout of onnxruntime's MatMulNBits and GatherBlockQuantized, each weight with its value in the GGUF.

    matrix = pack_exact(read_gguf("model.gguf"), "blk.0.ffn_down.weight")

Quantized types become `Packed`; F32, F16 and BF16 become float32[n_out, n_in].

| type | bits | block | what else |
|---|---|---|---|
| Q4_0 | 4 | 32 | |
| Q5_0, Q8_0 | 8 | 32 | |
| Q6_K | 8 | 16 | |
| Q4_1, Q4_K | 4 | 32 | zero points and minimums |
| Q5_1, Q5_K | 8 | 32 | minimums |

In the types with minimums a weight is q * scale - minimum. The operators have no minimums, but integer zero points. So
the zero point nearest to minimum / scale is subtracted from q, and the rest of the minimum becomes a product of its
own: the sums of the input's blocks times float32[n_out, n_blocks] (packing/nodes.py). Zero points of 0 and whole
minimums would give the same values, but inputs are rounded to int8 (accuracy level 4), and the error of that grows with
the weights it is multiplied by: it would be 1.5 times as large.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from edgedec.errors import MemoryCapError, UnsupportedModelError
from edgedec.gguf.file import FLOATS, GGUF, TensorInfo, floats
from edgedec.memory_plan import format_bytes
from edgedec_export.packing.rows import matrix_of, read_rows
from edgedec_export.source import require_finite
from edgedec_runtimes.weights.levels import F32, LEVELS, U8, Levels

PIECE_WEIGHTS = 1 << 20
"""Number of weights that are read and packed at a time."""

_ARRAYS = ("data", "scales", "zero_points", "minimums")
_DEFAULT_ZERO = {2: 2, 4: 8, 8: 128}


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A quantized matrix. A weight is (q - zero point) * scale - minimum.

    Attributes:
        bits: 2, 4 or 8.
        block: Number of neighbouring weights of a row that share a scale; 16 or a larger power of two.
        data: uint8[n_out, n_blocks, block * bits / 8]: the numbers q, the first in the lowest bits.
        scales: float32[n_out, n_blocks].
        zero_points: uint8[n_out, ceil(n_blocks * bits / 8)], packed like data; None where all are 2^(bits - 1).
        minimums: [n_out, n_in / min_block], a matrix itself; None where there are none.
        min_block: Number of weights that share a minimum; 0 without minimums.
        n_unused: Number of weights at the end of each row that only fill up the last block.
    """

    bits: int
    block: int
    data: U8
    scales: F32
    zero_points: U8 | None = None
    minimums: "Packed | F32 | None" = None
    min_block: int = 0
    n_unused: int = 0

    @property
    def shape(self) -> tuple[int, int]:
        """(n_out, n_in)."""
        return self.data.shape[0], self.data.shape[1] * self.block - self.n_unused

    @property
    def nbytes(self) -> int:
        """Size of all arrays in bytes, under the name that numpy's arrays use."""
        arrays = (getattr(self, name) for name in _ARRAYS)
        return sum(array.nbytes for array in arrays if array is not None)


Matrix = Packed | F32
"""A quantized matrix, or float32[n_out, n_in]."""

Rows = Levels | F32
"""Some rows of a matrix as they were read: levels, or float32[n_rows, n_in] where the file has numbers."""


def pack_exact(gguf: GGUF, name: str) -> Matrix:
    """Pack a matrix of a GGUF so that every weight keeps its value.

    The matrix is read and packed in pieces of rows: beside the result, some millions of weights are in memory.

    Raises:
        ModelFormatError: There is no such matrix, or the file has become shorter.
        UnsupportedModelError: The matrix has a type that is not in the table above.
        ModelNotFoundError, StorageError: The file is gone, or cannot be read.
        MemoryCapError: The system has too little memory for the result.
    """
    tensor = matrix_of(gguf, name)
    if tensor.type in FLOATS:
        n_in, n_out = tensor.shape
        values = _room((n_out, n_in), np.float32)
        for begin, rows in read_rows(gguf, tensor, PIECE_WEIGHTS):
            values[begin : begin + len(rows)] = floats(tensor.type, rows)
        return values
    pieces = read_rows(gguf, tensor, PIECE_WEIGHTS)
    return assemble(tensor.shape[1], ((begin, pack_levels(to_levels(gguf, tensor, rows))) for begin, rows in pieces))


def to_levels(gguf: GGUF, tensor: TensorInfo, rows: U8) -> Levels:
    """Return the levels of rows of a quantized matrix, which are given as in the file: uint8[n_rows, row_bytes].

    Raises:
        UnsupportedModelError: The type is not in the table above.
    """
    if tensor.type not in LEVELS:
        raise UnsupportedModelError(
            f"{gguf.paths[tensor.shard]}: tensor {tensor.name!r} is {tensor.type.name}, expected one of "
            f"{', '.join(kind.name for kind in (*FLOATS, *LEVELS))}; export another quantization of the model"
        )
    with np.errstate(all="ignore"):  # a damaged file may hold any scales
        return LEVELS[tensor.type](rows.reshape(-1, tensor.type.block_bytes)).by_row(len(rows))


def parse_rows(gguf: GGUF, tensor: TensorInfo, rows: U8) -> Rows:
    """Return the levels or numbers of rows, which are given as in the file: uint8[n_rows, row_bytes].

    Raises:
        ModelFormatError: The rows hold NaN or an infinity.
        UnsupportedModelError: The type is not in the table above.
    """
    parsed: Rows = floats(tensor.type, rows) if tensor.type in FLOATS else to_levels(gguf, tensor, rows)
    numbers = (parsed.scales, parsed.minimums) if isinstance(parsed, Levels) else (parsed,)
    require_finite(gguf, tensor.name, *numbers)
    return parsed


def weights_of(rows: Rows) -> F32:
    """Return the weights of rows, float32[n_rows, n_in]."""
    return rows.values() if isinstance(rows, Levels) else rows


def assemble(n_out: int, pieces: Iterator[tuple[int, Packed]]) -> Packed:
    """Join pieces of a matrix with n_out rows, each given with its first row, in arrays that are allocated once.

    Raises:
        MemoryCapError: The system has too little memory for the arrays.
    """
    whole: Packed | None = None
    for begin, piece in pieces:
        if whole is None:
            whole = _like(piece, n_out)
        _put(piece, whole, begin)
    assert whole is not None, "a tensor of a GGUF has a row or more"
    return whole


def dequantize(packed: Packed) -> F32:
    """Return the weights, float32[n_out, n_in], computed in the graph's order: product first, then difference.

    >>> data = np.array([[[0x21, 0xF0, *[0x88] * 6]]], np.uint8)
    >>> dequantize(Packed(4, 16, data, np.array([[0.5]], np.float32)))[0, :5].tolist()
    [-3.5, -3.0, -4.0, 3.5, 0.0]
    """
    n_out, n_blocks, _ = packed.data.shape
    zero: F32 | int = _DEFAULT_ZERO[packed.bits]
    if packed.zero_points is not None:
        unpacked = unpack_bits(packed.zero_points, packed.bits)[:, :n_blocks]
        zero = unpacked.reshape(n_out, n_blocks, 1).astype(np.float32)
    weights = unpack_bits(packed.data, packed.bits).astype(np.float32)
    weights -= zero
    with np.errstate(all="ignore"):
        weights *= packed.scales[..., None]
        weights = weights.reshape(n_out, -1)[:, : packed.shape[1]]
        if packed.minimums is not None:
            minimums = dequantize(packed.minimums) if isinstance(packed.minimums, Packed) else packed.minimums
            weights = weights.reshape(n_out, -1, packed.min_block) - minimums[..., None]
    return weights.reshape(packed.shape)


def pack_bits(values: U8, bits: int) -> U8:
    """Pack numbers below 2^bits along the last axis, the first in the lowest bits; zeros fill the last byte up.

    >>> pack_bits(np.array([1, 2, 3], np.uint8), 4).tolist()
    [33, 3]
    """
    if bits == 8:
        return values
    n = 8 // bits
    missing = -values.shape[-1] % n
    if missing:
        values = np.concatenate((values, np.zeros((*values.shape[:-1], missing), np.uint8)), axis=-1)
    packed = values[..., ::n].copy()
    for i in range(1, n):
        packed |= values[..., i::n] << np.uint8(bits * i)
    return packed


def unpack_bits(packed: U8, bits: int) -> U8:
    """Undo `pack_bits` along the last axis; the result includes what filled the last byte up."""
    n = 8 // bits
    values = np.empty((*packed.shape, n), np.uint8)
    for i in range(n):
        values[..., i] = packed >> np.uint8(bits * i) & np.uint8(2**bits - 1)
    return values.reshape(*packed.shape[:-1], -1)


def pack_levels(levels: Levels) -> Packed:
    """Arrange levels, given by row, in the operators' layout; every weight keeps its value."""
    bits = 4 if levels.n_levels <= 16 else 8
    block = levels.q.shape[2]
    if levels.minimums is None:
        shift = _DEFAULT_ZERO[bits] - levels.zero
        q = levels.q + np.uint8(shift) if shift else levels.q
        return Packed(bits, block, pack_bits(q, bits), levels.scales)
    if bits == 4:
        zero, rest = _centre(levels.scales, levels.minimums, 0, 15)
        data, zero_points = pack_bits(levels.q, 4), pack_bits(zero.astype(np.uint8), 4)
        return Packed(4, block, data, levels.scales, zero_points, rest, block)
    # 8 bits leave room to move q instead, so that the zero point stays 128.
    zero, rest = _centre(levels.scales, levels.minimums, levels.n_levels - 128, 128)
    q = levels.q + (128 - zero).astype(np.uint8)[..., None]
    return Packed(8, block, q, levels.scales, None, rest, block)


def _centre(scales: F32, minimums: F32, lowest: int, highest: int) -> tuple[NDArray[np.int16], F32]:
    """Split minimums into integer zero points and a rest, so that minimum = zero point * scale + rest exactly.

    A scale has 17 bits and q minus a zero point has 7, so their product is exact in float32, and subtracting the rest
    from it rounds as subtracting the minimum from q * scale does. Where float32 cannot hold the rest, the zero point is
    0.
    """
    with np.errstate(all="ignore"):
        zero = np.clip(np.rint(np.nan_to_num(minimums / scales)), lowest, highest)
        exact = minimums.astype(np.float64) - zero.astype(np.float64) * scales
        rest = exact.astype(np.float32)
        whole = rest == exact
    return np.where(whole, zero, 0).astype(np.int16), np.where(whole, rest, minimums)


def _like(piece: Packed, n_out: int) -> Packed:
    """Return a matrix of n_out rows with uninitialized arrays of the kinds that `piece` has."""
    rooms: dict[str, Any] = {}
    for field in _ARRAYS:
        array = getattr(piece, field)
        if isinstance(array, Packed):
            rooms[field] = _like(array, n_out)
        elif array is not None:
            rooms[field] = _room((n_out, *array.shape[1:]), array.dtype)
    return replace(piece, **rooms)


def _put(piece: Packed, whole: Packed, begin: int) -> None:
    """Copy a piece into the matrix from row `begin` on."""
    for field in _ARRAYS:
        target, source = getattr(whole, field), getattr(piece, field)
        if isinstance(source, Packed):
            _put(source, target, begin)
        elif source is not None:
            target[begin : begin + len(source)] = source


def _room(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an uninitialized array; raise MemoryCapError where the system has too little memory."""
    try:
        return np.empty(shape, dtype)
    except MemoryError as error:
        n_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        raise MemoryCapError(
            f"the system has no {format_bytes(n_bytes)} left for a packed matrix; close programs, or export a smaller "
            "model"
        ) from error
