"""The external data file of an ONNX graph: raw arrays, one after another.

Every array begins at a multiple of 4,096 bytes, so that a runtime can map it. Arrays are written as they are added and
not kept: whatever the file's size, one array is in memory at a time.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.closeable import Closeable

ALIGNMENT = 4096
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class DataPlace:
    """Where an array is in the file: its first byte and its length in bytes."""

    offset: int
    n_bytes: int


class DataFile(Closeable):
    """A new file that arrays are appended to; a context manager that closes it.

    Attributes:
        n_bytes: Bytes written so far.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._digest = hashlib.sha256()
        self.n_bytes = 0

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    @property
    def sha256(self) -> str:
        """SHA-256 (hex) of the bytes written so far."""
        return self._digest.hexdigest()

    def append(self, array: NDArray[Any]) -> DataPlace:
        """Write an array of any type in C order, little endian, at the next aligned byte; return its place.

        Raises:
            OSError: The array cannot be written.
        """
        self._write(memoryview(bytes(-self.n_bytes % ALIGNMENT)))
        offset = self.n_bytes
        little = array.dtype.newbyteorder("<")
        flat = np.ascontiguousarray(array, dtype=little).reshape(-1).view(np.uint8)
        for start in range(0, len(flat), _BLOCK_BYTES):
            self._write(flat[start : start + _BLOCK_BYTES].data)
        return DataPlace(offset, self.n_bytes - offset)

    def _write(self, data: memoryview) -> None:
        """Write all of the data: a nearly full disk takes a part of it first, and fails at the next call."""
        self._digest.update(data)
        self.n_bytes += len(data)
        while len(data):
            data = data[self._file.write(data) :]
