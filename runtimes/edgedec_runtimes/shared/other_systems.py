"""The memory of macOS and Windows, by psutil; edgedec.memory.system reads that of Linux from files."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Bytes of memory that the machine has, and that could be taken without swapping; None where unknown."""

    total: int | None = None
    available: int | None = None


@dataclass(frozen=True, slots=True)
class Process:
    """Bytes that this process holds in memory, and the most that it has held; None where unknown."""

    resident: int | None = None
    peak: int | None = None


def machine() -> Machine:
    """Return the machine's memory; unknown without psutil, which is installed where Linux is not."""
    try:
        import psutil

        found = psutil.virtual_memory()
    except (ImportError, OSError):
        return Machine()
    return Machine(found.total, found.available)


def process() -> Process:
    """Return the memory of this process (psutil has the peak on Windows only); unknown without psutil."""
    try:
        import psutil

        found = psutil.Process().memory_info()
    except (ImportError, OSError):
        return Process()
    return Process(found.rss, getattr(found, "peak_wset", None))
