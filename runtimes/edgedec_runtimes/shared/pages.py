"""Pages of memory and of files, as far as systems differ: private memory, what is mapped, what the cache holds.

Only Linux tells where a library has mapped a file, and lets a program give such pages back; elsewhere nothing is known
of them, and nothing happens.
"""

import ctypes
import mmap
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Mapping = tuple[int, int]
"""Address and length in bytes."""

T = TypeVar("T")

MAPPED_FILES_MOVE = sys.platform != "win32"
"""Whether a file can be renamed or deleted while a process has mapped it."""

_opening = threading.Lock()


def private_memory(n_bytes: int) -> mmap.mmap:
    """Return memory of zeros that begins with a page, and that no other process sees.

    Raises:
        OSError: The system refuses the memory; or MemoryError.
    """
    if sys.platform == "win32":
        return mmap.mmap(-1, n_bytes)
    return mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def with_mappings(paths: Sequence[Path], load: Callable[[], T]) -> tuple[T, list[Mapping]]:
    """Call `load`, and return its result and the mappings of these files that it made.

    Mappings that another load made of the same files are not among them: loads run one after another. Mappings with a
    page that was written to are left out. On other systems than Linux the list is empty.
    """
    with _opening:
        before = {mapping for mapping, _ in _mappings(paths)}
        loaded = load()
        return loaded, [mapping for mapping, clean in _mappings(paths) if clean and mapping not in before]


def _mappings(paths: Sequence[Path]) -> list[tuple[Mapping, bool]]:
    try:
        names = {os.fspath(path.resolve()) for path in paths}
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):  # not Linux, or no permission
        return []
    return [mapping for name in names for mapping in parsed_mappings(name, lines)]


def parsed_mappings(name: str, lines: list[str]) -> Iterator[tuple[Mapping, bool]]:
    """Yield each mapping of a file in the lines of /proc/PID/smaps, and whether none of its pages was written to.

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


def give_back(mappings: Sequence[Mapping]) -> None:
    """Give back the pages of mapped files, which must be mapped still: a page that is read again comes from the cache.

    Args:
        mappings: What with_mappings found; on other systems than Linux there is none.
    """
    if not mappings:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, n_bytes in mappings:
        madvise(start, n_bytes, mmap.MADV_DONTNEED)


def give_back_all(memory: mmap.mmap) -> None:
    """Give back the pages of a mapped file that is only read, where the system can do that."""
    if hasattr(mmap, "MADV_DONTNEED"):
        memory.madvise(mmap.MADV_DONTNEED)


def forget(fd: int, offset: int = 0, n_bytes: int = 0) -> None:
    """Have the system's cache drop a part of a file, from `offset` to the end for 0, but for pages that are mapped."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # a file system that can't do that
            os.posix_fadvise(fd, offset, n_bytes, os.POSIX_FADV_DONTNEED)


def open_around_cache(path: Path) -> int:
    """Return the descriptor of a file, opened to be read around the cache where reading a first page that way works."""
    flags = os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
    direct = getattr(os, "O_DIRECT", 0)
    if direct:
        with suppress(OSError):
            fd = os.open(path, flags | direct)
            try:
                os.preadv(fd, [private_memory(mmap.PAGESIZE)], 0)
                return fd
            except OSError:
                os.close(fd)
    fd = os.open(path, flags)
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(fd, fcntl.F_NOCACHE, 1)
    return fd


def native_handle(fd: int) -> int:
    """Return the handle by which native code reads an open file: the descriptor; on Windows, the system's handle."""
    if sys.platform != "win32":
        return fd
    import msvcrt

    return msvcrt.get_osfhandle(fd)


def is_mapped(error: OSError) -> bool:
    """Return whether an error says that a file can't be deleted because a process has it open or mapped."""
    return not MAPPED_FILES_MOVE and isinstance(error, PermissionError)


def is_mostly_hole(status: os.stat_result) -> bool:
    """Return whether most of a file is a hole, which takes no room on a disk; False where the system does not tell."""
    n_blocks = getattr(status, "st_blocks", None)
    return n_blocks is not None and n_blocks * 512 < status.st_size // 2
