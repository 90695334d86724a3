"""Reads rows of an export's matrices, as floats, from the file of its weights: what a draft head borrows.

    rows = open_matrix(export, parts, "token_embd.weight")
    rows.read(np.array([5, 9]))  # float32[2, n_columns]: the bits that the graph looks up

A matrix NAME is stored as ONNX Runtime's operators take it (edgedec_export.packing): as floats in NAME.weight, or as
numbers q of a few bits in NAME.rows or NAME.data, with NAME.scales for each block, maybe NAME.zero_points, and maybe
NAME.minimums, which is a matrix itself. A weight is then (q - zero point) * scale - minimum.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import DATA, reading
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.graph_parts import GraphParts, Tensor

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"
_BITS = (2, 4, 8)
_BLOCKS = tuple(1 << i for i in range(4, 17))

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Rows = NDArray[np.int32]
Fetch = Callable[[Tensor, Rows], NDArray[Any]]
"""Reads rows of a tensor as they are stored, [n, elements of a row]."""


@dataclass(frozen=True, slots=True)
class Floats:
    """A matrix of floats."""

    tensor: Tensor

    def values(self, rows: Rows, fetch: Fetch) -> F32:
        """Return rows, float32[n, columns]."""
        return fetch(self.tensor, rows).astype(np.float32)


@dataclass(frozen=True, slots=True)
class Packed:
    """A matrix of blocks.

    Attributes:
        bits: 2, 4 or 8.
        block: How many weights share a scale.
        n_columns: Columns; the last block may have more.
        data: uint8, the numbers q of each row, the first in the lowest bits.
        scales: float32[rows, blocks].
        zero_points: uint8, packed as the numbers; None where all are 2^(bits - 1).
        minimums: [rows, blocks], or None.
    """

    bits: int
    block: int
    n_columns: int
    data: Tensor
    scales: Tensor
    zero_points: Tensor | None
    minimums: "Matrix | None"

    def values(self, rows: Rows, fetch: Fetch) -> F32:
        """Return rows, float32[n, columns]."""
        n, n_blocks = len(rows), self.scales.shape[1]
        values = _unpacked(fetch(self.data, rows), self.bits).reshape(n, n_blocks, self.block).astype(np.float32)
        if self.zero_points is None:
            values -= np.float32(1 << (self.bits - 1))
        else:
            values -= _unpacked(fetch(self.zero_points, rows), self.bits)[:, :n_blocks, None].astype(np.float32)
        with np.errstate(all="ignore"):  # a damaged file may hold any scales
            values *= fetch(self.scales, rows)[..., None]
            if self.minimums is not None:
                values -= self.minimums.values(rows, fetch)[..., None]
        return values.reshape(n, -1)[:, : self.n_columns]


Matrix = Floats | Packed


class MatrixRows:
    """A matrix of an export, whose rows are read one by one from the file of the weights.

    Attributes:
        n_rows: How many rows there are.
    """

    def __init__(self, export: Export, matrix: Matrix, n_rows: int) -> None:
        """Open the file (StorageError where it can't be)."""
        self.n_rows = n_rows
        self._matrix = matrix
        self._path = export.folder / DATA
        with reading(self._path):
            self._file = self._path.open("rb", buffering=0) if DATA in export.files else None

    def read(self, rows: Rows) -> F32:
        """Return rows, float32[n, columns].

        Raises:
            ModelFormatError: There is no such row, or the file has become shorter.
            StorageError: The file can't be read.
        """
        if rows.size and not 0 <= rows.min() <= rows.max() < self.n_rows:
            raise ModelFormatError(
                f"{self._path}: row {rows.max()} of a matrix of {self.n_rows} rows is wanted; take a head of this model"
            )
        return self._matrix.values(rows, self._fetch)

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        if self._file is not None:
            self._file.close()

    def _fetch(self, tensor: Tensor, rows: Rows) -> NDArray[Any]:
        row_bytes = tensor.n_bytes // self.n_rows
        if tensor.inside is not None:
            return tensor.inside.reshape(self.n_rows, row_bytes)[rows].view(tensor.dtype)
        assert self._file is not None, "a tensor outside the graph lies in the file"
        row_bytes_of = np.empty((len(rows), row_bytes), np.uint8)
        with reading(self._path):
            for place, row in zip(row_bytes_of, rows.tolist(), strict=True):
                self._file.seek(tensor.offset + row * row_bytes)
                if self._file.readinto(place.data) != row_bytes:
                    raise ModelFormatError(f"{self._path}: it has become shorter; copy the export again")
        return row_bytes_of.view(tensor.dtype)


def open_matrix(export: Export, parts: GraphParts, name: str) -> MatrixRows:
    """Return a matrix of a graph, [n_vocab, n_embd].

    Raises:
        UnsupportedModelError: The graph has no such matrix, or stores it in a way that is not known.
        StorageError: The file of the weights can't be opened.
    """
    matrix = find_matrix(parts, name, export.n_vocab, export.n_embd)
    if matrix is None:
        raise UnsupportedModelError(
            f"{export.graph}: it has no matrix {name!r} of {export.n_vocab} x {export.n_embd} that a draft head can "
            "borrow rows of; export the model again, or use a head with an embedding and an output matrix of its own"
        )
    return MatrixRows(export, matrix, export.n_vocab)


def find_matrix(parts: GraphParts, name: str, n_rows: int, n_columns: int) -> Matrix | None:
    """Return how a matrix is stored; None where it is absent, or its parts have other sizes than they must have."""
    whole = parts.tensors.get(f"{name}.weight")
    if whole is not None:
        return Floats(whole) if whole.shape == (n_rows, n_columns) and whole.dtype == np.dtype("<f4") else None
    numbers = parts.numbers.get(f"{name}.look_up") or parts.numbers.get(name) or {}
    bits, block = numbers.get("bits", 0), numbers.get("block_size", 0)
    data = parts.tensors.get(f"{name}.rows") or parts.tensors.get(f"{name}.data")
    scales, zero_points = (parts.tensors.get(f"{name}.{field}") for field in ("scales", "zero_points"))
    if bits not in _BITS or block not in _BLOCKS or data is None or scales is None:
        return None
    n_blocks = -(-n_columns // block)
    sizes = [(data, n_blocks * block * bits // 8), (scales, 4 * n_blocks)]
    sizes += [] if zero_points is None else [(zero_points, -(-n_blocks * bits // 8))]
    if scales.shape != (n_rows, n_blocks) or scales.dtype != np.dtype("<f4"):
        return None
    if any(tensor.n_bytes != n_rows * row_bytes for tensor, row_bytes in sizes):
        return None
    if data.dtype != np.uint8 or (zero_points is not None and zero_points.dtype != np.uint8):
        return None
    minimums = None
    if any(key.startswith(f"{name}.minimums.") for key in parts.tensors):
        minimums = find_matrix(parts, f"{name}.minimums", n_rows, n_blocks)
        if minimums is None or n_columns % block:
            return None
    return Packed(bits, block, n_columns, data, scales, zero_points, minimums)


def _unpacked(packed: U8, bits: int) -> U8:
    """Return the numbers of `bits` bits along the last axis, the first in the lowest bits."""
    if bits == 8:
        return packed
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    spread = (packed[..., None] >> shifts) & np.uint8((1 << bits) - 1)
    return spread.reshape(*packed.shape[:-1], -1)
