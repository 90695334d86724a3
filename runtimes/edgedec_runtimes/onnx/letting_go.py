"""Pages of the weights' file that ONNX Runtime maps and no longer needs.

It copies most matrices into an arrangement of its own and keeps the file's scales and zero points mapped beside them,
unread; of the embedding it reads a row per token, for which the system maps 64 KiB around each. Both would count as
held. On Linux these pages are given back; what is read again comes from the system's cache of the file.
"""

import ctypes
import mmap
import sys

from edgedec_runtimes.shared.file_mappings import Mapping

LET_GO_ROWS = 256
"""Tokens looked up in the embedding between two times."""


def let_go(pages: list[Mapping]) -> None:
    """Give back the pages of mappings, whose graph is alive."""
    if not pages or sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, n_bytes in pages:
        madvise(start, n_bytes, mmap.MADV_DONTNEED)
