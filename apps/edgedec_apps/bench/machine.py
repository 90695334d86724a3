"""Facts about the machine for a benchmark: memory bandwidth, peak of resident memory, versions."""

import platform
from importlib import metadata
from typing import Any

import edgedec
from edgedec.errors import RuntimeUnavailableError
from edgedec_runtimes.cpu.library import read_bandwidth
from edgedec_runtimes.shared.cpu_count import usable_cores

_N_READS = 3
_READ_BYTES = 1 << 29  # more than any cache holds
_PACKAGES = ("numpy", "llama-cpp-python")


def bandwidths(n_threads: int, cap_bytes: int | None = None) -> list[float]:
    """Measure the bandwidth of memory a few times; return GB per second that `n_threads` read.

    The list is empty where the cpu runtime's library is absent. A buffer of 512 MiB, or half of `cap_bytes`, is used
    for a moment.
    """
    n_bytes = _READ_BYTES if cap_bytes is None else min(_READ_BYTES, cap_bytes // 2)
    try:
        found = [read_bandwidth(n_threads, n_bytes) / 1e9 for _ in range(_N_READS)]
    except RuntimeUnavailableError:
        return []
    return [speed for speed in found if speed > 0]


def versions() -> dict[str, Any]:
    """Return the versions of edgedec, Python and installed packages, the machine and its usable cores."""
    found: dict[str, Any] = {"edgedec": edgedec.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found | {"machine": platform.processor() or platform.machine(), "cores": usable_cores()}
