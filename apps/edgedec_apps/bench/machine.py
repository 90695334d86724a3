"""What a benchmark says of the machine: memory bandwidth, peak of resident memory, versions."""

import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import edgedec
from edgedec.errors import RuntimeUnavailableError
from edgedec_runtimes.cpu.library import read_bandwidth
from edgedec_runtimes.shared.cpu_count import usable_cores

_N_READS = 3
_READ_BYTES = 1 << 29  # more than any cache holds
_PACKAGES = ("numpy", "llama-cpp-python")


def bandwidths(n_threads: int, cap_bytes: int | None = None) -> list[float]:
    """Measure a few times how many GB per second `n_threads` read from memory.

    Nothing where the cpu runtime's library is absent. It takes a buffer of 512 MiB for a moment, at most half of
    `cap_bytes`.
    """
    n_bytes = _READ_BYTES if cap_bytes is None else min(_READ_BYTES, cap_bytes // 2)
    try:
        found = [read_bandwidth(n_threads, n_bytes) / 1e9 for _ in range(_N_READS)]
    except RuntimeUnavailableError:
        return []
    return [speed for speed in found if speed > 0]


def forget_peak() -> bool:
    """Let the system count the process's peak of resident memory from now on; return whether it can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:
        return False
    return True


def versions() -> dict[str, Any]:
    """Return edgedec's version, those of Python and of packages where they are installed, and the machine."""
    found: dict[str, Any] = {"edgedec": edgedec.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"machine": platform.processor() or platform.machine(), "cores": usable_cores()}
