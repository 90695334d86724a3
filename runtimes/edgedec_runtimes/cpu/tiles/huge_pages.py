"""Huge pages for the weights (2 MiB on most machines): a thread that reads them waits less for the page tables.

A mapped tile file lies in huge pages where the system's cache holds the file in pieces of that size. Whether it does is
up to the file system, and to how the file came into the cache. Such pages cost nothing: all processes share them, and
the next start finds them. Otherwise private memory has them, which no process shares, and which the system can't drop.
"""

import mmap
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from time import perf_counter

import numpy as np

from edgedec.errors import as_storage_error
from edgedec.memory import system
from edgedec_runtimes.shared.pages import forget

SMAPS = Path("/proc/self/smaps")
GIVEN = Path("/sys/kernel/mm/transparent_hugepage")

Span = tuple[int, int]
"""The first byte of a part of a mapping, at the start of a page, and its number of bytes."""

_POPULATE_READ, _COLLAPSE = 22, 25  # madvise of Linux 5.14 and 6.1, which Python has no names for
_PIECE_BYTES = 64 << 20
_NEARLY_ALL = 0.9
_RATE_BYTES = 64 << 20
_RATE_BLOCK = 4 << 20


@dataclass(frozen=True, slots=True)
class HugePages:
    """The large pages that the system gives to programs without setting memory apart for them (Linux: transparent).

    Attributes:
        n_bytes: The size of one, 2 MiB on most machines.
        private: Which private memory gets them: "always" all of it, "madvise" where a program asks, "never" none.
    """

    n_bytes: int
    private: str


def huge_pages(folder: Path = GIVEN) -> HugePages | None:
    """Return which huge pages the system gives (mm/transhuge.rst); None where it has none, or does not tell."""
    size = re.fullmatch(r"\s*0*([1-9][0-9]{0,19})\s*", _text(folder / "hpage_pmd_size"))
    mode = re.search(r"\[(always|madvise|never)\]", _text(folder / "enabled"))
    return None if size is None or mode is None else HugePages(int(size[1]), mode[1])


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


def ask_for(memory: mmap.mmap, spans: Iterable[Span] | None = None) -> None:
    """Ask the system to use huge pages for private memory, or for a mapped file; do nothing where it has none.

    Args:
        memory: The memory, before its pages are touched.
        spans: The parts to ask for; None for all of it.
    """
    if sys.platform != "linux":
        return
    for start, n_bytes in spans or ((0, len(memory)),):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE, start, n_bytes)


def share_of(address: int, n_bytes: int, smaps: Path = SMAPS) -> float:
    """Return which share of the resident bytes in [address, address + n_bytes) lies in huge pages, 0.0 to 1.0.

    The mappings that overlap with the range count whole. 0.0 where the system does not tell.
    """
    resident = huge = 0
    inside = False
    try:
        text = smaps.read_text(encoding="ascii", errors="replace")
    except OSError:
        return 0.0
    for line in text.splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) < address + n_bytes and address < int(match[2], 16)
        elif inside and (value := re.match(r"(Rss|AnonHugePages|ShmemPmdMapped|FilePmdMapped):\s+([0-9]+) kB", line)):
            if value[1] == "Rss":
                resident += int(value[2])
            else:
                huge += int(value[2])
    return min(1.0, huge / resident) if resident else 0.0


def read_in_huge_pages(
    memory: mmap.mmap, fd: int, spans: Sequence[Span], report: Callable[[int], None], smaps: Path = SMAPS
) -> bool:
    """Read a mapped file to memory so that the system's cache holds it in huge pages; return whether it does now.

    Three ways are tried in turn: the cache may hold the file so already; the kernel may join the cached pages; the
    cache may drop them and read the file again, if no other process has mapped them and the file system has large
    pages. Where none of the ways works, no page of the file is mapped by this process at the end.

    Args:
        memory: The mapping of all of the file.
        fd: The file.
        spans: The parts to read.
        report: Called with the number of bytes read so far; what it raises ends the reading.
        smaps: The system's list of this process's mappings.
    """
    if sys.platform != "linux":
        return False
    address = np.frombuffer(memory, np.uint8).ctypes.data

    def is_huge() -> bool:
        return share_of(address, len(memory), smaps) >= _NEARLY_ALL

    def advise_all(advice: int) -> None:
        for start, n_bytes in spans:
            memory.madvise(advice, start, n_bytes)

    ask_for(memory, spans)
    try:
        advise_all(_POPULATE_READ)
        if is_huge():
            return True
        with suppress(OSError):  # most kernels don't join the pages of files on a disk
            advise_all(_COLLAPSE)
            if is_huge():
                return True
        advise_all(mmap.MADV_DONTNEED)
        forget(fd)
        done = 0
        for start, n_bytes in _pieces(spans):
            memory.madvise(_POPULATE_READ, start, n_bytes)
            done += n_bytes
            report(done)
            if done >= _PIECE_BYTES and not is_huge():  # then the others won't be either
                break
        if is_huge():
            return True
    except OSError:  # an older kernel, or a page that can't be read, which copying says in its words
        pass
    with suppress(OSError):
        advise_all(mmap.MADV_DONTNEED)
    return False


def no_private_ones(n_bytes: int) -> str:
    """Return why `n_bytes` of weights are not copied to huge pages of private memory; "" where they can be."""
    pages = huge_pages()
    if pages is None or pages.private == "never":
        return "the system gives no huge pages (transparent_hugepage/enabled)"
    free = system.available_bytes()
    if free is not None and free < n_bytes:
        return f"{n_bytes / 1e6:.1f} MB would be copied, and {free / 1e6:.1f} MB are free"
    return ""


def copying_seconds(path: Path, n_bytes: int) -> float:
    """Return how long reading `n_bytes` of a file to private memory takes, by a measurement of at most 64 MB of it.

    The file is as the system's cache has it now: bytes that are not there come from the disk.

    Raises:
        StorageError: The file can't be read, or is empty.
    """
    with as_storage_error(str(path), "check the disk"):
        status = os.stat(path)
        return n_bytes / _rate(path, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=16)
def _rate(path: Path, n_bytes: int, _mtime_ns: int) -> float:
    """Return the bytes per second, measured once in this process as long as the file does not change."""
    with path.open("rb", buffering=0) as file, mmap.mmap(-1, _RATE_BYTES) as memory:
        ask_for(memory)
        began, done = perf_counter(), 0
        file.seek(max(0, n_bytes - _RATE_BYTES) // 2)
        with memoryview(memory) as whole:
            while done < _RATE_BYTES and (n := file.readinto(whole[done : done + _RATE_BLOCK])):
                done += n
    if not done:
        raise OSError(f"{path} is empty")
    return done / max(1e-9, perf_counter() - began)


def _pieces(spans: Iterable[Span]) -> Iterable[Span]:
    for start, n_bytes in spans:
        for begin in range(0, n_bytes, _PIECE_BYTES):
            yield start + begin, min(_PIECE_BYTES, n_bytes - begin)
