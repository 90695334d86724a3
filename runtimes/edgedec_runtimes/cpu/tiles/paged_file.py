"""Reading a file in whole pages, around the system's cache where the file system can do that."""

import mmap
import os
from pathlib import Path

import numpy as np

from edgedec.closeable import Closeable
from edgedec.errors import MemoryCapError, as_storage_error
from edgedec.memory_plan import format_bytes
from edgedec_runtimes.cpu.library import address, check, native
from edgedec_runtimes.cpu.tiles.file import U8
from edgedec_runtimes.cpu.tiles.huge_pages import ask_for
from edgedec_runtimes.shared.pages import forget, native_handle, open_around_cache, private_memory

PAGE_BYTES = 4096
"""The size of a page: offsets, lengths and addresses of reads are multiples of it."""

HUGE_PAGE_BYTES = 2 << 20
"""The size of a huge page, and so of the least memory that can lie in one."""


class PagedFile(Closeable):
    """An open file. Leaving its context closes it.

    Attributes:
        path: The path by which it was opened.
        n_bytes: Its size when it was opened.
    """

    def __init__(self, path: Path) -> None:
        """Open a file (StorageError where that fails)."""
        self.path = path
        with as_storage_error(str(path), "check the disk and the file's permissions"):
            self._fd = open_around_cache(path)
            self.n_bytes = os.fstat(self._fd).st_size

    @property
    def handle(self) -> int:
        """The file as the native library takes it, valid until close()."""
        return native_handle(self._fd)

    def read(self, offset: int, n_bytes: int, out: U8) -> int:
        """Read the pages that hold the bytes [offset, offset + n_bytes) to the front of `out`.

        Args:
            offset: The first byte wanted.
            n_bytes: How many bytes are wanted.
            out: uint8[...] at the start of a page of memory, with room for whole pages.

        Returns:
            The index in `out` at which the wanted bytes begin.

        Raises:
            StorageError: The bytes can't be read, or the file got shorter.
        """
        first = offset // PAGE_BYTES * PAGE_BYTES
        assert len(out) >= -(-(offset + n_bytes) // PAGE_BYTES) * PAGE_BYTES - first, "no room for whole pages"
        assert address(out) % PAGE_BYTES == 0, "not at the start of a page"
        code = native().ec_file_read(self.handle, self.n_bytes, offset, n_bytes, address(out))
        check(code, str(self.path))
        return offset - first

    def forget(self, offset: int, n_bytes: int) -> None:
        """Have the system drop a range from its cache, so that the next reading of it is as fast as the disk."""
        forget(self._fd, offset, n_bytes)

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def page_buffer(n_bytes: int) -> U8:
    """Return zeros in private memory, in whole pages: uint8[at least n_bytes].

    As much as a huge page takes begins with one, and lies in huge pages where the system has them: a disk then writes
    to one piece of memory and not to many.

    Raises:
        MemoryCapError: The system refuses the memory.
    """
    n_bytes = max(1, -(-n_bytes // PAGE_BYTES)) * PAGE_BYTES
    if n_bytes < HUGE_PAGE_BYTES:
        return np.frombuffer(_private(n_bytes), np.uint8)
    memory = _private(n_bytes + HUGE_PAGE_BYTES)
    out = np.frombuffer(memory, np.uint8)
    begin = -address(out) % HUGE_PAGE_BYTES
    ask_for(memory, [(begin, n_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)])
    return out[begin : begin + n_bytes]


def _private(n_bytes: int) -> mmap.mmap:
    try:
        return private_memory(n_bytes)
    except (OSError, MemoryError) as error:
        raise MemoryCapError(f"the system has no {format_bytes(n_bytes)} for weights; allow fewer to stay") from error
