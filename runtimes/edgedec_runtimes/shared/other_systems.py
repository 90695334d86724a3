"""The memory of macOS and Windows, through ctypes; edgedec.memory.system reads that of Linux from files."""

import ctypes
import mmap
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

_T = TypeVar("_T")
_HOST_VM_INFO64, _MACH_TASK_BASIC_INFO = 4, 20  # mach/host_info.h, mach/task_info.h
_THIS_PROCESS = -1  # Windows: the value of GetCurrentProcess


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


class VmStatistics64(ctypes.Structure):
    """macOS: vm_statistics64 of mach/vm_statistics.h, in pages, up to the last counter that every release fills in."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("free", "active", "inactive", "wired")),
        ("events", ctypes.c_uint64 * 9),
        *((name, ctypes.c_uint32) for name in ("purgeable", "speculative")),
        ("compressions", ctypes.c_uint64 * 4),
        *((name, ctypes.c_uint32) for name in ("compressor", "throttled", "file_backed", "anonymous")),
        ("compressed", ctypes.c_uint64),
    )


class MachTaskBasicInfo(ctypes.Structure):
    """macOS: mach_task_basic_info of mach/task_info.h, which has no padding."""

    _pack_ = 4
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("virtual", "resident", "resident_max")),
        ("times", ctypes.c_int32 * 4),
        *((name, ctypes.c_int32) for name in ("policy", "n_suspended")),
    )


class MemoryStatusEx(ctypes.Structure):
    """Windows: MEMORYSTATUSEX of sysinfoapi.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_struct_bytes", "load_percent")),
        *((name, ctypes.c_uint64) for name in ("total", "available")),
        ("others", ctypes.c_uint64 * 5),
    )


class ProcessMemoryCounters(ctypes.Structure):
    """Windows: PROCESS_MEMORY_COUNTERS of psapi.h."""

    _fields_ = (
        *((name, ctypes.c_uint32) for name in ("n_struct_bytes", "n_faults")),
        *((name, ctypes.c_size_t) for name in ("peak_working_set", "working_set")),
        ("others", ctypes.c_size_t * 6),
    )


def machine() -> Machine:
    """Return the machine's memory, as macOS or Windows reports it."""
    return _ask_system({"darwin": macos_machine, "win32": windows_machine}) or Machine()


def process() -> Process:
    """Return the memory of this process, as macOS or Windows reports it."""
    return _ask_system({"darwin": macos_process, "win32": windows_process}) or Process()


def _ask_system(by_platform: Mapping[str, Callable[[Any], _T | None]]) -> _T | None:
    ask = by_platform.get(sys.platform)
    if ask is None:
        return None
    try:
        return ask(ctypes.CDLL("kernel32" if sys.platform == "win32" else None))
    except (OSError, AttributeError):  # no such library, no such function
        return None


def macos_machine(library: Any) -> Machine | None:
    """Return hw.memsize, and the pages that are free or inactive; None where a call fails."""
    total, n_total_bytes = ctypes.c_uint64(), ctypes.c_size_t(8)
    if library.sysctlbyname(b"hw.memsize", ctypes.byref(total), ctypes.byref(n_total_bytes), None, ctypes.c_size_t(0)):
        return None
    pages, n_words = VmStatistics64(), ctypes.c_uint32(ctypes.sizeof(VmStatistics64) // 4)
    host = library.mach_host_self()
    code = library.host_statistics64(host, _HOST_VM_INFO64, ctypes.byref(pages), ctypes.byref(n_words))
    library.mach_port_deallocate(library.mach_task_self(), host)  # or every call would keep a reference
    return None if code else Machine(total.value, (pages.free + pages.inactive) * mmap.PAGESIZE)


def macos_process(library: Any) -> Process | None:
    """Return this task's resident_size and its maximum; None where the call fails."""
    info, n_words = MachTaskBasicInfo(), ctypes.c_uint32(ctypes.sizeof(MachTaskBasicInfo) // 4)
    task = library.mach_task_self()
    code = library.task_info(task, _MACH_TASK_BASIC_INFO, ctypes.byref(info), ctypes.byref(n_words))
    return None if code else Process(info.resident, info.resident_max)


def windows_machine(library: Any) -> Machine | None:
    """Return what GlobalMemoryStatusEx reports; None where the call fails."""
    status = MemoryStatusEx(n_struct_bytes=ctypes.sizeof(MemoryStatusEx))
    return Machine(status.total, status.available) if library.GlobalMemoryStatusEx(ctypes.byref(status)) else None


def windows_process(library: Any) -> Process | None:
    """Return this process's working set (GetProcessMemoryInfo); None where the call fails."""
    counters = ProcessMemoryCounters(n_struct_bytes=ctypes.sizeof(ProcessMemoryCounters))
    size = ctypes.c_uint32(ctypes.sizeof(counters))
    if not library.K32GetProcessMemoryInfo(ctypes.c_void_p(_THIS_PROCESS), ctypes.byref(counters), size):
        return None
    return Process(counters.working_set, counters.peak_working_set)
