"""The external data file of an ONNX graph: raw arrays, one after another, written as they come.

Every array begins at a multiple of 4,096 bytes, so that a runtime can map it. Nothing is kept: memory stays at one
array, whatever the file's size.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 4096
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Place:
    """Where an array lies in the file: its first byte and its length in bytes."""

    offset: int
    n_bytes: int


class DataFile:
    """A file that arrays are appended to inside a `with` block.

    Attributes:
        n_bytes: What was written so far.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._digest = hashlib.sha256()
        self.n_bytes = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of what was written so far."""
        return self._digest.hexdigest()

    def append(self, array: NDArray[Any]) -> Place:
        """Write an array of any type in C order, little endian, at the next aligned byte and return its place.

        Raises:
            OSError: It can't be written.
        """
        self._write(memoryview(bytes(-self.n_bytes % ALIGNMENT)))
        offset = self.n_bytes
        little = array.dtype.newbyteorder("<")
        flat = np.ascontiguousarray(array, dtype=little).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _BLOCK_BYTES):
            self._write(flat[start : start + _BLOCK_BYTES].data)
        return Place(offset, self.n_bytes - offset)

    def _write(self, data: memoryview) -> None:
        """Write all of it; a full disk takes a part first and fails at the next call."""
        self._digest.update(data)
        self.n_bytes += len(data)
        while len(data):
            data = data[self._file.write(data) :]
