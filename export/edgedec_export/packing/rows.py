"""Read the rows of a GGUF's matrices, a few at a time."""

from collections.abc import Iterable, Iterator

import numpy as np

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec_runtimes.weights.levels import U8


def matrix_of(gguf: GGUF, name: str) -> TensorInfo:
    """Return a tensor that is a matrix; its shape is (n_in, n_out), in ggml's order.

    Raises:
        ModelFormatError: There is no tensor of that name, or it has not two dimensions.
    """
    tensor = gguf.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        actual = "no such tensor" if tensor is None else f"{len(tensor.shape)} dimensions"
        raise ModelFormatError(
            f"{gguf.paths[0]}: expected a matrix {name!r}, found {actual}; another model may be meant"
        )
    return tensor


def read_rows(gguf: GGUF, tensor: TensorInfo, n_weights: int) -> Iterator[tuple[int, U8]]:
    """Yield a matrix in pieces of about n_weights: the first row's number, and uint8[n_rows, row_bytes].

    Raises:
        ModelFormatError: The file has become shorter since it was opened.
        ModelNotFoundError, StorageError: The file is gone, or cannot be read.
    """
    n_in, n_out = tensor.shape
    step = min(n_out, max(1, n_weights // n_in))
    return _read(gguf, tensor, ((begin, min(step, n_out - begin)) for begin in range(0, n_out, step)))


def sample_rows(gguf: GGUF, tensor: TensorInfo, n_rows: int) -> U8:
    """Return evenly spaced rows of a matrix, uint8[at most n_rows, row_bytes].

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: As `read_rows`.
    """
    n_out = tensor.shape[1]
    chosen = np.unique(np.linspace(0, n_out - 1, min(n_rows, n_out)).astype(np.int64))
    return np.concatenate([row for _, row in _read(gguf, tensor, ((int(i), 1) for i in chosen))])


def _read(gguf: GGUF, tensor: TensorInfo, spans: Iterable[tuple[int, int]]) -> Iterator[tuple[int, U8]]:
    """Yield spans of rows, each given by its first row and its number of rows, be the file a GGUF or its tiles."""
    row_bytes = tensor.n_bytes // tensor.shape[1]
    for begin, n_rows in spans:
        data = gguf.read_tensor_bytes(tensor.name, begin * row_bytes, n_rows * row_bytes)
        yield begin, np.frombuffer(data, np.uint8).reshape(n_rows, row_bytes)
