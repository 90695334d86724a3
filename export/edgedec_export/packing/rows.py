"""Read the rows of a GGUF's matrices, a few at a time."""

from collections.abc import Iterable, Iterator

import numpy as np

from edgedec.errors import ModelFormatError, ModelNotFoundError, StorageError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec_runtimes.weights.levels import U8


def matrix_of(gguf: GGUF, name: str) -> TensorInfo:
    """Return a tensor that is a matrix; its shape is (n_in, n_out), in ggml's order.

    Raises:
        ModelFormatError: There is no tensor of that name, or it has not two dimensions.
    """
    tensor = gguf.tensors.get(name)
    if tensor is None or len(tensor.shape) != 2:
        found = "no such tensor" if tensor is None else f"{len(tensor.shape)} dimensions"
        raise ModelFormatError(
            f"{gguf.paths[0]}: expected a matrix {name!r}, found {found}; another model may be meant"
        )
    return tensor


def read_rows(gguf: GGUF, tensor: TensorInfo, n_weights: int) -> Iterator[tuple[int, U8]]:
    """Yield a matrix in pieces of about n_weights: the first row's number, and uint8[n_rows, row_bytes].

    The array of one piece is overwritten by the next.

    Raises:
        ModelFormatError: The file has become shorter since it was opened.
        ModelNotFoundError, StorageError: The file is gone, or cannot be read.
    """
    n_in, n_out = tensor.shape
    step = min(n_out, max(1, n_weights // n_in))
    return _read(gguf, tensor, ((begin, min(step, n_out - begin)) for begin in range(0, n_out, step)), step)


def sample_rows(gguf: GGUF, tensor: TensorInfo, n_rows: int) -> U8:
    """Return evenly spaced rows of a matrix, uint8[at most n_rows, row_bytes].

    Raises:
        ModelFormatError, ModelNotFoundError, StorageError: As `read_rows`.
    """
    n_out = tensor.shape[1]
    chosen = np.unique(np.linspace(0, n_out - 1, min(n_rows, n_out)).astype(np.int64))
    return np.concatenate([row.copy() for _, row in _read(gguf, tensor, ((int(i), 1) for i in chosen), 1)])


def _read(gguf: GGUF, tensor: TensorInfo, spans: Iterable[tuple[int, int]], most: int) -> Iterator[tuple[int, U8]]:
    """Yield spans of rows, each given by its first row and its number of rows, which is at most `most`."""
    path = gguf.paths[tensor.shard]
    row_bytes = tensor.n_bytes // tensor.shape[1]
    buffer = np.empty((most, row_bytes), np.uint8)
    try:
        with path.open("rb") as file:
            for begin, n_rows in spans:
                rows = buffer[:n_rows]
                file.seek(tensor.offset + begin * row_bytes)
                if file.readinto(rows.reshape(-1).data) != rows.nbytes:
                    raise ModelFormatError(
                        f"{path}: tensor {tensor.name!r} reaches beyond the file's end: the file has become shorter "
                        "since it was opened; download or copy it again"
                    )
                yield begin, rows
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"{path}: the file has been deleted or moved; check the folder") from error
    except OSError as error:
        raise StorageError(f"{path}: reading failed ({error.strerror or error}); check the disk") from error
