"""How fast this machine reads memory, measured a few times and kept in the cache."""

from edgedec.errors import RuntimeUnavailableError
from edgedec.memory.system import available_bytes
from edgedec.storage import probe_cache
from edgedec_models.folders import cache_folder
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.processor import machine_name

_KIND = "bandwidth"
_N_CALLS = 5  # that measure; at one of them the machine may have been busy
_N_READS = 3
_MOST_SPEED = 1e14
_MOST_BYTES = 1 << 29  # more than any processor's cache holds
_LEAST_BYTES = 1 << 26


def memory_bandwidth() -> float | None:
    """Return the bytes per second that all usable cores read from memory; None where that can't be measured.

    The best reading is kept, as other programs only slow readings down. It is taken at the first calls on a machine,
    and again on another processor or with another number of cores.
    """
    n_cores = usable_cores()
    key = f"{machine_name()} {n_cores}"
    readings = _readings(probe_cache.get(cache_folder(), _KIND, key))
    if len(readings) < _N_CALLS:
        measured, is_quiet = probe_cache.quietly(lambda: read_memory(n_cores))
        readings += [] if measured is None else [measured]
        if is_quiet and measured is not None:
            probe_cache.put(cache_folder(), _KIND, key, readings)
    return max(readings, default=None)


def _readings(kept: object) -> list[float]:
    """Return the readings of earlier calls; damaged ones are left out."""
    found = kept if isinstance(kept, list) else []
    return [float(each) for each in found if isinstance(each, int | float) and 0 < each < _MOST_SPEED]


def read_memory(n_cores: int) -> float | None:
    """Return the bytes per second that so many cores read from memory now; None where that can't be measured."""
    from edgedec_runtimes.cpu.library import read_bandwidth

    available = available_bytes()
    n_bytes = _MOST_BYTES if available is None else min(_MOST_BYTES, available // 8)
    if n_bytes < _LEAST_BYTES:
        return None
    try:
        best = max(read_bandwidth(n_cores, n_bytes) for _ in range(_N_READS))
    except RuntimeUnavailableError:
        return None
    return best if best > 0 else None
