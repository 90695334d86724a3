"""Memory that both processes map, in which rows of logits go from the child to the parent without a copy in a pipe."""

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MEMORY_FOLDER = "/dev/shm"  # files there are memory; the file's own name is drawn by tempfile
_MOST_BYTES = 64 << 20


def n_shared_rows(n_rows: int, n_vocab: int) -> int:
    """Return how many of at most `n_rows` rows are shared: as many as 64 MiB have room for, and one at the least."""
    return max(1, min(n_rows, _MOST_BYTES // (4 * n_vocab)))


class SharedRows:
    """A file of rows, f32[n_rows, n_vocab], that two processes map.

    Attributes:
        path: The file.
        rows: f32[n_rows, n_vocab], the memory.
    """

    def __init__(self, path: Path, n_rows: int, n_vocab: int) -> None:
        """Map a file that has the size of these rows."""
        self.path = path
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 4 * n_rows * n_vocab)
        self.rows: NDArray[np.float32] = np.frombuffer(self._map, np.float32).reshape(n_rows, n_vocab)

    @classmethod
    def create(cls, n_rows: int, n_vocab: int) -> "SharedRows":
        """Make a file for n_shared_rows(n_rows, n_vocab) rows, which only this user may read."""
        folder = _MEMORY_FOLDER if os.access(_MEMORY_FOLDER, os.W_OK) else None
        n_rows = n_shared_rows(n_rows, n_vocab)
        handle, name = tempfile.mkstemp(prefix="edgedec-rows-", dir=folder)
        try:
            os.truncate(handle, 4 * n_rows * n_vocab)
        finally:
            os.close(handle)
        return cls(Path(name), n_rows, n_vocab)

    def unlink(self) -> None:
        """Take the file's name away, where the system lets a mapped file go; the memory lives until nobody maps it."""
        with suppress(OSError):
            self.path.unlink()
