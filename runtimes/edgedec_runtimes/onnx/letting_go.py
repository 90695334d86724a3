"""Pages of the weights' file that ONNX Runtime maps and no longer needs.

It copies most matrices into an arrangement of its own and keeps the file's scales and zero points mapped beside them,
unread; of the embedding it reads a row per token, for which the system maps 64 KiB around each. Both would count as
held. On Linux these pages are given back; what is read again comes from the system's cache of the file.
"""

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

LET_GO_ROWS = 256
"""Tokens looked up in the embedding between two times."""

Mapping = tuple[int, int]
T = TypeVar("T")

_opening = threading.Lock()


def with_mappings(path: Path, open_graph: Callable[[], T]) -> tuple[T, list[Mapping]]:
    """Open a graph, and return it with address and length of each of its mappings of the weights' file.

    They are the graph's as long as it lives: those of another graph on the same file are not among them, as graphs are
    opened one after another. A mapping with a page that was written to is left out.
    """
    with _opening:
        before = {mapping for mapping, _ in _mappings(path)}
        graph = open_graph()
        return graph, [mapping for mapping, clean in _mappings(path) if clean and mapping not in before]


def let_go(pages: list[Mapping]) -> None:
    """Give back the pages of mappings, whose graph is alive."""
    if not pages or sys.platform != "linux":
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, n_bytes in pages:
        madvise(start, n_bytes, mmap.MADV_DONTNEED)


def _mappings(path: Path) -> list[tuple[Mapping, bool]]:
    try:
        name, lines = os.fspath(path.resolve()), Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # not Linux, or not to be looked at
        return []
    return list(parsed_mappings(name, lines))


def parsed_mappings(name: str, lines: list[str]) -> Iterator[tuple[Mapping, bool]]:
    """Yield the mappings of a file in the lines of /proc/PID/smaps, and whether none of their pages was written to.

    >>> head = "1000-3000 rw-p 00000000 08:01 7   /w/model.onnx.data"
    >>> list(parsed_mappings("/w/model.onnx.data", [head, "Rss:  8 kB", "Anonymous:   0 kB"]))
    [((4096, 8192), True)]
    """
    current: Mapping | None = None
    for line in lines:
        key, _, rest = line.partition(" ")
        if "-" in key:
            start, stop = (int(end, 16) for end in key.split("-"))
            current = (start, stop - start) if line.endswith(f" {name}") else None
        elif key == "Anonymous:" and current is not None:
            yield current, rest.split()[0] == "0"
