"""Memory that both processes map, in which rows of logits go from the child to the parent without a copy in a pipe."""

import mmap
import os
import tempfile
from contextlib import suppress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import counted
from edgedec.memory_plan import MemoryTerm

_MEMORY_FOLDER = "/dev/shm"  # files there are memory; the file's own name is drawn by tempfile
_MOST_BYTES = 64 << 20


def n_shared_rows(n_rows: int, n_vocab: int) -> int:
    """Return how many of at most `n_rows` rows are shared: as many as 64 MiB have room for, and one at the least."""
    return max(1, min(n_rows, _MOST_BYTES // (4 * n_vocab)))


class SharedRows:
    """A file of rows, f32[n_rows, n_vocab], that two processes map.

    Attributes:
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


_INTERPRETER_BYTES = 50_000_000  # of Python, numpy and llama.cpp: 49 MB; with the reference runtime 38 MB
_TOKEN_BYTES = 64  # that ChildTokenizer keeps of a token: its bytes, and where they and the flag are listed


def process_term() -> MemoryTerm:
    """Return the term of the memory plan that is the child's own."""
    return MemoryTerm("process of the model", _INTERPRETER_BYTES, "another interpreter with its libraries")


def shared_terms(n_vocab: int, n_rows: int) -> tuple[MemoryTerm, ...]:
    """Return the terms of what both processes hold once a model is loaded in a child.

    Pages that both processes map count twice, as the system counts them for each of the two.

    Args:
        n_vocab: Length of a row of logits.
        n_rows: Rows of logits that a forward may return.
    """
    n_shared = n_shared_rows(n_rows, n_vocab)
    return (
        MemoryTerm("shared logits", 2 * 4 * n_shared * n_vocab, f"{counted(n_shared, 'row')}, in both processes"),
        MemoryTerm("copied vocabulary", _TOKEN_BYTES * n_vocab, "in the process that writes the text"),
    )
