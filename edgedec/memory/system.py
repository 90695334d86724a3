"""The memory that the system has, the limits that it sets, and what this process holds, with others that belong to it.

Linux reports them in files below /proc and /sys/fs/cgroup (the kernel's Documentation: filesystems/proc.rst,
accounting/psi.rst, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst); the functions take these folders as arguments.
On macOS and Windows psutil asks the system. A figure that can't be read, or makes no sense, is None.
"""

import ctypes
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # version 1 writes a number just below 2^63 where there is no limit
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 4096


@dataclass(frozen=True, slots=True)
class _Names:
    """The names of a control group's files, and of the lines of memory.stat that count pages the group can drop."""

    limits: tuple[str, ...]
    current: str
    reclaimable: tuple[str, ...]


_V1 = _Names(
    limits=("memory.limit_in_bytes",),
    current="memory.usage_in_bytes",
    reclaimable=("total_active_file", "total_inactive_file"),
)
_V2 = _Names(
    limits=("memory.max", "memory.high"),
    current="memory.current",
    reclaimable=("active_file", "inactive_file", "slab_reclaimable"),
)


def resident_bytes(proc: Path = PROC) -> int | None:
    """Return the bytes that this process holds in memory now, as the system counts them."""
    return _status(proc).get("VmRSS") if _is_linux(proc) else _by_psutil(lambda ps: ps.Process().memory_info().rss)


def peak_resident_bytes(proc: Path = PROC) -> int | None:
    """Return the most bytes that this process has held in memory so far."""
    if _is_linux(proc):
        peak = _status(proc).get("VmHWM")
    else:  # macOS does not say
        peak = _by_psutil(lambda ps: getattr(ps.Process().memory_info(), "peak_wset", None))
    return _most_used() if peak is None and proc == PROC else peak


def held_bytes(others: Sequence[int], proc: Path = PROC) -> int | None:
    """Return the bytes that this process and others hold in memory now; pages that two of them map count twice.

    The others are given by their numbers (pid). One that has ended holds nothing. Only Linux tells of other processes;
    elsewhere they count nothing.
    """
    resident = resident_bytes(proc)
    return None if resident is None else resident + _sum(others, "VmRSS", proc)


def peak_held_bytes(others: Sequence[int], proc: Path = PROC) -> int | None:
    """Return the most bytes that this process and others have held in memory so far, as held_bytes counts them.

    The system knows the peak of each process, and not that of their sum. So this is the others' peaks with what this
    process holds now, or this process's own peak where that is more: it may have been reached before the others began.
    """
    peak = peak_resident_bytes(proc)
    if not others:
        return peak
    resident = resident_bytes(proc)
    return None if peak is None or resident is None else max(peak, resident + _sum(others, "VmHWM", proc))


def held_reader(others: Callable[[], Sequence[int]], proc: Path = PROC) -> Callable[[], int | None]:
    """Return a fast held_bytes for the calling process; `others` is asked at each reading, as processes come and go."""
    read_resident = resident_reader(proc)

    def read() -> int | None:
        held = read_resident()
        return None if held is None else held + _sum(others(), "VmRSS", proc)

    return read


def _sum(processes: Sequence[int], name: str, proc: Path) -> int:
    """Return the sum of a line of the status of processes; one that can't be read counts nothing."""
    return sum(_status(proc, str(pid)).get(name, 0) for pid in processes) if _is_linux(proc) else 0


def resident_reader(proc: Path = PROC) -> Callable[[], int | None]:
    """Return a fast resident_bytes for the calling process: on Linux one system call on a file that stays open."""
    if not _is_linux(proc):
        return resident_bytes
    statm = _open(proc / "self" / "statm")

    def read() -> int | None:
        fields = statm().split()
        n_pages = _number(fields[1]) if len(fields) > 1 else None
        return None if n_pages is None else n_pages * _PAGE_BYTES

    return read


def total_bytes(proc: Path = PROC) -> int | None:
    """Return the bytes of memory that the machine has."""
    return _meminfo(proc).get("MemTotal") if _is_linux(proc) else _by_psutil(lambda ps: ps.virtual_memory().total)


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the bytes that this process could still take without swapping.

    On Linux that is the least of MemAvailable and of what each control group above this process leaves: the group's
    limit less what the group holds; its page cache counts as free.
    """
    if not _is_linux(proc):
        return _by_psutil(lambda ps: ps.virtual_memory().available)
    names, folders = _groups(proc, cgroup)
    return _least([_meminfo(proc).get("MemAvailable"), *(_left(folder, names) for folder in folders)])


def cgroup_limit_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the least memory limit of the control groups above this process; None where there is none."""
    names, folders = _groups(proc, cgroup)
    return _least([_limit(folder, names) for folder in folders])


def pressure_reader(proc: Path = PROC, cgroup: Path = CGROUP) -> Callable[[], float | None]:
    """Return a function that reads the memory pressure: one system call on each of a few files, which stay open.

    The pressure is the share of the last 10 s in which something waited for memory, in percent (PSI, "some avg10"): of
    the machine or of a control group above this process, whichever waited most. None where it is not reported.
    """
    names, folders = _groups(proc, cgroup)
    of_groups = [folder / "memory.pressure" for folder in folders if names is _V2]
    files = [_open(path) for path in (proc / "pressure" / "memory", *of_groups) if path.exists()]

    def read() -> float | None:
        shares = [_average(file()) for file in files]
        return max((share for share in shares if share is not None), default=None)

    return read


def return_free_memory() -> None:
    """Give freed pages of the heap back to the system, which counts them as held; only glibc can."""
    trim = glibc("malloc_trim")
    if trim is not None:
        trim(ctypes.c_size_t(0))


def glibc(name: str) -> Any:
    """Return a function of glibc's heap, or None on other systems and where the C library (musl) lacks it."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def _is_linux(proc: Path) -> bool:
    """Return whether the figures are in files: on Linux, and where the caller names a folder."""
    return sys.platform == "linux" or proc != PROC


def _by_psutil(read: Callable[[Any], int | None]) -> int | None:
    """Return what `read` takes from psutil, on macOS and Windows; None where psutil is missing, or can't say."""
    try:
        import psutil  # is installed where Linux is not

        return read(psutil)
    except (ImportError, OSError):
        return None


def _status(proc: Path, process: str = "self") -> dict[str, int]:
    return _kilobytes(_text(proc / process / "status"))


def _meminfo(proc: Path) -> dict[str, int]:
    return _kilobytes(_text(proc / "meminfo"))


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("ascii", "replace")
    except (OSError, ValueError):  # ValueError: a path that was read from a file may be no path
        return ""


def forget_peak() -> bool:
    """Reset the peak of this process's memory to what it holds now; return whether the system can do that (Linux)."""
    try:
        (PROC / "self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def _most_used() -> int | None:
    """Return the peak by getrusage, for sandboxes whose /proc is not complete."""
    try:
        import resource  # absent on Windows
    except ImportError:
        return None
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * 1024


def _open(path: Path) -> Callable[[], str]:
    """Open a file of the system; return a function that reads its present text, "" where it can't be read.

    The file is closed when the function is dropped.
    """
    try:
        handle = os.open(path, os.O_RDONLY)
    except (OSError, ValueError):
        return lambda: ""

    def read() -> str:
        try:
            return os.pread(handle, 4096, 0).decode("ascii", "replace")
        except OSError:
            return ""

    weakref.finalize(read, os.close, handle)
    return read


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"\s*[0-9]{1,20}\s*", text) else None


def _kilobytes(text: str) -> dict[str, int]:
    """Return the lines "name: number kB" of a text as bytes by name."""
    return {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s+([0-9]{1,18}) kB$", text, re.MULTILINE)}


def _least(numbers: list[int | None]) -> int | None:
    return min((n_bytes for n_bytes in numbers if n_bytes is not None), default=None)


def _groups(proc: Path, cgroup: Path) -> tuple[_Names, list[Path]]:
    """Return the names of the files of this process's control groups, and the groups' folders, the innermost first.

    In a container the path may name folders outside of the container; only the folders that exist count.
    """
    paths = dict(_memberships(_text(proc / "self" / "cgroup")))
    v1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
    names, root, path = (_V2, cgroup, paths.get("", "/")) if v1 is None else (_V1, cgroup / "memory", v1)
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return names, [root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    """Yield controllers and path of each line "number:controllers:path"."""
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields[1], fields[2]


def _limit(folder: Path, names: _Names) -> int | None:
    limit = _least([_number(_text(folder / name)) for name in names.limits])
    return None if limit is None or limit >= _NO_LIMIT else limit


def _left(folder: Path, names: _Names) -> int | None:
    """Return the bytes that a control group leaves of its limit: all where what the group holds can't be read."""
    limit = _limit(folder, names)
    if limit is None:
        return None
    held = _number(_text(folder / names.current)) or 0
    counts = dict(re.findall(r"^(\w+) ([0-9]{1,18})$", _text(folder / "memory.stat"), re.MULTILINE))
    reclaimable = sum(int(counts.get(name, 0)) for name in names.reclaimable)
    return min(limit, max(0, limit - held + reclaimable))


def _average(text: str) -> float | None:
    match = re.search(r"^some avg10=([0-9]{1,3}\.[0-9]{1,6})\b", text, re.MULTILINE)
    return min(float(match[1]), 100.0) if match else None
