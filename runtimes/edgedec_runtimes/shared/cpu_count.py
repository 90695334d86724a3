"""Counts the threads that a forward should use: one for each core that this process may run on."""

import os
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_CGROUP_LIMIT = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return how many physical cores this process may use, by its affinity and its cgroup's limit; at least 1."""
    try:
        allowed = os.sched_getaffinity(0)
    except AttributeError:  # macOS, Windows
        allowed = set(range(os.cpu_count() or 1))
    cores = {_siblings(cpu) for cpu in allowed}
    return max(1, min(len(cores), _cgroup_cores()))


def _siblings(cpu: int) -> str:
    """Return a name of the physical core that a logical CPU belongs to; its own number where the system has none."""
    try:
        return (_CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii").strip()
    except OSError:
        return str(cpu)


def _cgroup_cores() -> int:
    """Return the cores that the cgroup's quota allows, rounded up; a very large number where there is no quota."""
    try:
        quota, period = _CGROUP_LIMIT.read_text(encoding="ascii").split()
        return -(-int(quota) // int(period))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2, or "max"
        return 1 << 16
