"""Rows of a target's embedding and output matrix, as floats: what a head borrows."""

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec_runtimes.weights.levels import dequantize

EMBEDDING, OUTPUT = "token_embd.weight", "output.weight"


def output_name(gguf: GGUF) -> str:
    """Return the name of the tensor that is the output matrix: its own, or the embedding's where they are one."""
    return OUTPUT if OUTPUT in gguf.tensors else EMBEDDING


def read_rows(gguf: GGUF, name: str, rows: NDArray[np.int32]) -> NDArray[np.float32]:
    """Return rows of a matrix, float32[n, n_columns].

    Raises:
        UnsupportedModelError: A row does not exist, or its type is none that edgedec takes apart.
        ModelFormatError, ModelNotFoundError, StorageError: The matrix is absent, or can't be read.
    """
    raw = read_raw_rows(gguf, name, rows)
    return dequantize(gguf.tensors[name].type, raw)


def read_raw_rows(gguf: GGUF, name: str, rows: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return rows of a matrix as the file holds them, uint8[n, row_bytes]; raises what `read_rows` raises."""
    data = np.frombuffer(gguf.read_tensor_bytes(name), np.uint8) if len(rows) > 64 else None
    shape = gguf.tensors[name].shape if name in gguf.tensors else (0, 0)
    if len(shape) != 2 or (rows.size and not 0 <= rows.min() <= rows.max() < shape[1]):
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: tensor {name!r} has the shape {shape}, expected a matrix with rows up to "
            f"{rows.max(initial=0)}; the head is of another model: take one that was trained for this one"
        )
    row_bytes = gguf.tensors[name].n_bytes // shape[1]
    if data is not None:
        return data.reshape(-1, row_bytes)[rows]
    rows_read = [gguf.read_tensor_bytes(name, int(row) * row_bytes, row_bytes) for row in rows]
    return np.frombuffer(b"".join(rows_read), np.uint8).reshape(-1, row_bytes)
