"""Gives back pages of the weights' file that ONNX Runtime has mapped and no longer needs.

ONNX Runtime copies most matrices into an arrangement of its own, and keeps the file's scales and zero points mapped
without reading them again. Of the embedding it reads a row per token, for which the system maps 64 KiB around the row.
Both would count as memory of the process. On Linux these pages are given back; a page that is read again comes from the
system's cache of the file.
"""

import ctypes
import mmap
import sys

from edgedec_runtimes.shared.file_mappings import Mapping

LET_GO_ROWS = 256
"""How many tokens are looked up in the embedding before pages are given back again."""


def let_go(pages: list[Mapping]) -> None:
    """Give back the pages of mappings; the graph that they belong to must be open."""
    if not pages or sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, n_bytes in pages:
        madvise(start, n_bytes, mmap.MADV_DONTNEED)
