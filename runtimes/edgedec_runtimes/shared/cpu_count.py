"""The processor's cores: which this process may use, and how many threads a forward should have."""

import os
import sys
from pathlib import Path

_ROOT = Path("/")
_NO_LIMIT = 1 << 16


def usable_cores() -> int:
    """Return how many physical cores this process may use, by its affinity and its cgroups' limits; at least 1."""
    if sys.platform == "linux":
        return max(1, min(len(linux_cores()), cgroup_cores()))
    try:
        import psutil
    except ImportError:
        return os.cpu_count() or 1
    return psutil.cpu_count(logical=False) or os.cpu_count() or 1


def linux_cores(allowed: set[int] | None = None, root: Path = _ROOT) -> list[tuple[int, ...]]:
    """Return the logical processors of each physical core, the fastest cores first.

    Cores of a hybrid processor differ in what Linux calls their capacity, or else in their highest frequency.

    Args:
        allowed: The logical processors that count; None for those that this process may run on.
        root: The folder that has `sys`.
    """
    if allowed is None:
        allowed = os.sched_getaffinity(0) if sys.platform == "linux" else set()
    folder = root / "sys/devices/system/cpu"
    cores: dict[str, list[int]] = {}
    for cpu in sorted(allowed):
        siblings = _text(folder / f"cpu{cpu}/topology/thread_siblings_list")
        cores.setdefault(siblings or f"cpu{cpu}", []).append(cpu)
    return sorted((tuple(cpus) for cpus in cores.values()), key=lambda cpus: -_speed(folder / f"cpu{cpus[0]}"))


def cores_to_pin(n_threads: int) -> list[tuple[int, ...]]:
    """Return the logical processors that each of a forward's threads should keep to; [] where none should.

    Threads keep to a core each where there is a thread for every core that the process may use. Beside a busy process
    the scheduler would else put two of them on one core at times (docs/cpu-kernels.md). Where threads are fewer than
    cores, they must be able to leave a busy one. EDGEDEC_CPU_PIN=0 in the environment has none keep to any.
    """
    if sys.platform != "linux" or n_threads < 2 or os.environ.get("EDGEDEC_CPU_PIN") == "0":
        return []
    cores = linux_cores()
    return cores if len(cores) == n_threads and cgroup_cores() >= n_threads else []


def cgroup_cores(root: Path = _ROOT) -> int:
    """Return the cores that this process's cgroups and those above them allow, rounded up; 65,536 without a limit.

    Args:
        root: The folder that has `proc` and `sys`.
    """
    limits = [_NO_LIMIT]
    mounted = root / "sys/fs/cgroup"
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2) if line.count(":") >= 2 else ("", "-", "")
        if controllers == "":
            limits += [_unified_limit(folder) for folder in _upwards(mounted, path)]
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", controllers):
                limits += [_quota_limit(folder) for folder in _upwards(mounted / mount, path)]
    return min(limits)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.lstrip("-").isdigit() else 0


def _speed(cpu: Path) -> int:
    return _number(cpu / "cpu_capacity") or _number(cpu / "cpufreq/cpuinfo_max_freq")


def _upwards(mount: Path, path: str) -> list[Path]:
    """Return the folder of a cgroup and those above it; in a container, `path` may lead to nothing below the mount."""
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:n]) for n in range(len(parts) + 1)]


def _unified_limit(folder: Path) -> int:
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    return _cores_of(int(quota) if quota.isdigit() else -1, int(period) if period.isdigit() else 0)


def _quota_limit(folder: Path) -> int:
    return _cores_of(_number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us"))


def _cores_of(quota: int, period: int) -> int:
    return -(-quota // period) if quota > 0 and period > 0 else _NO_LIMIT
