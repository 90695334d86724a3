"""What the system says of memory: what it could still give, what limits it sets, what this process holds.

Linux says it in files below /proc and /sys/fs/cgroup (the kernel's Documentation: filesystems/proc.rst,
accounting/psi.rst, admin-guide/cgroup-v2.rst and cgroup-v1/memory.rst); the functions take these two folders as
arguments. macOS and Windows are asked through edgedec.memory.platform. What can't be read or makes no sense is None.
"""

import ctypes
import os
import re
import sys
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from edgedec.memory import platform as platform_memory

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 1 << 62  # what version 1 writes where there is no limit is just below 2^63
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE") if sys.platform == "linux" else 4096


@dataclass(frozen=True, slots=True)
class Resident:
    """What this process holds in memory, in bytes.

    Attributes:
        total: All of it.
        private: Anonymous and shared pages, which are given back only when they are freed; None where unknown.
        mapped: Pages of mapped files, which the system can drop and read again; None where unknown.
    """

    total: int
    private: int | None = None
    mapped: int | None = None


@dataclass(frozen=True, slots=True)
class _Names:
    """What the files of a control group are called."""

    limits: tuple[str, ...]
    current: str
    peak: str
    reclaimable: tuple[str, ...]  # of memory.stat


_V1 = _Names(
    limits=("memory.limit_in_bytes",),
    current="memory.usage_in_bytes",
    peak="memory.max_usage_in_bytes",
    reclaimable=("total_active_file", "total_inactive_file"),
)
_V2 = _Names(
    limits=("memory.max", "memory.high"),
    current="memory.current",
    peak="memory.peak",
    reclaimable=("active_file", "inactive_file", "slab_reclaimable"),
)


def resident(proc: Path = PROC) -> Resident | None:
    """Return what this process holds in memory now, as the system counts it."""
    if not _is_linux(proc):
        process = platform_memory.process()
        return None if process is None else Resident(process.resident)
    sizes = _kilobytes(_text(proc / "self" / "status"))
    total, anonymous, mapped = sizes.get("VmRSS"), sizes.get("RssAnon"), sizes.get("RssFile")
    if total is None:
        return None
    private = None if anonymous is None else anonymous + sizes.get("RssShmem", 0)
    return Resident(total, private, mapped)


def resident_bytes(proc: Path = PROC) -> int | None:
    """Return what this process holds in memory now, as the system counts it; None where it can't be read."""
    held = resident(proc)
    return None if held is None else held.total


def peak_resident_bytes(proc: Path = PROC) -> int | None:
    """Return the most this process has held so far; None where it can't be read."""
    if _is_linux(proc):
        peak = _kilobytes(_text(proc / "self" / "status")).get("VmHWM")
        return _most_used() if peak is None and proc == PROC else peak
    process = platform_memory.process()
    return _most_used() if process is None else process.peak


def resident_reader(proc: Path = PROC) -> Callable[[], int | None]:
    """Return a quick resident_bytes for the process it is made in: on Linux a system call on a file that stays open."""
    if not _is_linux(proc):
        return resident_bytes
    statm = _open(proc / "self" / "statm")

    def read() -> int | None:
        fields = statm().split()
        n_pages = _number(fields[1]) if len(fields) > 1 else None
        return None if n_pages is None else n_pages * _PAGE_BYTES

    return read


def total_bytes(proc: Path = PROC) -> int | None:
    """Return the machine's memory."""
    if not _is_linux(proc):
        machine = platform_memory.machine()
        return None if machine is None else machine.total
    return _kilobytes(_text(proc / "meminfo")).get("MemTotal")


def available_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return what this process could still take without swapping, other processes' page cache included.

    On Linux that is the least of MemAvailable and of what each control group above this process leaves: its limit
    less what it holds, page cache not counted, as that makes room.
    """
    if not _is_linux(proc):
        machine = platform_memory.machine()
        return None if machine is None else machine.available
    names, folders = _groups(proc, cgroup)
    found = [_kilobytes(_text(proc / "meminfo")).get("MemAvailable"), *(_left(folder, names) for folder in folders)]
    return _least(found)


def cgroup_limit_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the least memory limit of the control groups above this process; None where there is none."""
    names, folders = _groups(proc, cgroup)
    return _least([_limit(folder, names) for folder in folders])


def cgroup_peak_bytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the most that this process's control group has held, page cache included."""
    names, folders = _groups(proc, cgroup)
    peaks = (_number(_text(folder / names.peak)) for folder in folders)
    return next((peak for peak in peaks if peak is not None), None)


def pressure(proc: Path = PROC, cgroup: Path = CGROUP) -> float | None:
    """Return the share of the last 10 s in which something waited for memory, in percent (PSI, "some avg10").

    Of the machine and this process's control groups, the one that waited most. None where the system doesn't tell.
    """
    return pressure_reader(proc, cgroup)()


def pressure_reader(proc: Path = PROC, cgroup: Path = CGROUP) -> Callable[[], float | None]:
    """Return a quick pressure for the process it is made in: a system call on each file, which stay open."""
    names, folders = _groups(proc, cgroup)
    of_groups = [folder / "memory.pressure" for folder in folders if names is _V2]
    files = [_open(path) for path in (proc / "pressure" / "memory", *of_groups) if path.exists()]

    def read() -> float | None:
        shares = [_average(file()) for file in files]
        return max((share for share in shares if share is not None), default=None)

    return read


def return_free_memory() -> None:
    """Give freed heap pages back to the system, where the C library can (glibc): they would count as held."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(ctypes.c_size_t(0))


def _is_linux(proc: Path) -> bool:
    """Tell whether to read files: on Linux, and where the caller names a folder."""
    return sys.platform == "linux" or proc != PROC


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode("ascii", "replace")
    except (OSError, ValueError):  # a path out of a file may be none
        return ""


def _most_used() -> int | None:
    """Return what getrusage says; where /proc is not complete, as in some sandboxes, it is all there is."""
    try:
        import resource  # absent on Windows
    except ImportError:
        return None
    maximum = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return maximum if sys.platform == "darwin" else maximum * 1024


def _open(path: Path) -> Callable[[], str]:
    """Open a file of the system for good; return what gives its present text, empty where it can't be read."""
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
    """Return the lines "name: number kB" in bytes."""
    return {name: int(number) * 1024 for name, number in re.findall(r"^(\w+):\s+([0-9]{1,18}) kB$", text, re.MULTILINE)}


def _least(found: list[int | None]) -> int | None:
    return min((n_bytes for n_bytes in found if n_bytes is not None), default=None)


def _groups(proc: Path, cgroup: Path) -> tuple[_Names, list[Path]]:
    """Return the names of the files of this process's control groups, and the groups' folders, the innermost first.

    In a container the path may be one outside of it: what is found of it, and the root, counts.
    """
    paths = dict(_memberships(_text(proc / "self" / "cgroup")))
    v1 = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
    names, root, path = (_V2, cgroup, paths.get("", "/")) if v1 is None else (_V1, cgroup / "memory", v1)
    parts = [part for part in path.split("/") if part]
    if ".." in parts:
        parts = []
    return names, [root.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]


def _memberships(text: str) -> Iterator[tuple[str, str]]:
    """Go through the lines "number:controllers:path"."""
    for line in text.splitlines():
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields[1], fields[2]


def _limit(folder: Path, names: _Names) -> int | None:
    found = _least([_number(_text(folder / name)) for name in names.limits])
    return None if found is None or found >= _NO_LIMIT else found


def _left(folder: Path, names: _Names) -> int | None:
    """Return what a control group leaves of its limit; all of it where what it holds can't be read."""
    limit = _limit(folder, names)
    if limit is None:
        return None
    held = _number(_text(folder / names.current)) or 0
    counts = dict(re.findall(r"^(\w+) ([0-9]{1,18})$", _text(folder / "memory.stat"), re.MULTILINE))
    reclaimable = sum(int(counts.get(name, 0)) for name in names.reclaimable)
    return min(limit, max(0, limit - held + reclaimable))


def _average(text: str) -> float | None:
    found = re.search(r"^some avg10=([0-9]{1,3}\.[0-9]{1,6})\b", text, re.MULTILINE)
    return min(float(found[1]), 100.0) if found else None
