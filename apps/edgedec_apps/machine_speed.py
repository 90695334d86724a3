"""How fast this machine reads memory, and how fast its models wrote, kept in the cache between starts."""

from contextlib import suppress
from pathlib import Path
from time import monotonic, process_time
from typing import TYPE_CHECKING

from edgedec.errors import RuntimeUnavailableError
from edgedec.memory.system import available_bytes
from edgedec.storage import probe_cache
from edgedec_models.folders import cache_folder
from edgedec_runtimes.shared.cpu_count import usable_cores
from edgedec_runtimes.shared.processor import machine_name

if TYPE_CHECKING:
    from edgedec.api.engine import Engine

_READING, _WRITING = "bandwidth", "speed"
_N_KEPT = 5  # of the readings of memory, which end then, and the latest of each model
_N_READS = 3
_MOST_SPEED = 1e14
_MOST_BYTES = 1 << 29  # more than any processor's cache holds
_LEAST_BYTES = 1 << 26
_QUIET = 0.8  # of the processor time that reading takes on a machine without other programs


def memory_bandwidth(*, measure: bool = True) -> float | None:
    """Return the bytes per second that all usable cores read from memory; None where that was not measured.

    The best reading is kept, as other programs only slow readings down. It is taken at the first calls on a machine
    at which other programs leave the cores free, and again on another processor or with another number of cores;
    without `measure` it is not taken.
    """
    n_cores = usable_cores()
    key = f"{machine_name()} {n_cores} quiet"
    readings = _kept(_READING, key)
    if measure and len(readings) < _N_KEPT and (measured := read_memory(n_cores)) is not None:
        readings.append(measured)
        probe_cache.put(cache_folder(), _READING, key, readings)
    return max(readings, default=None)


def read_memory(n_cores: int) -> float | None:
    """Return the bytes per second that so many cores read from memory now.

    The result is None where there is no memory for it, or where other programs took the cores meanwhile: the process
    then got less processor time than the reading takes.
    """
    from edgedec_runtimes.cpu.library import read_bandwidth

    available = available_bytes()
    n_bytes = _MOST_BYTES if available is None else min(_MOST_BYTES, available // 8)
    if n_bytes < _LEAST_BYTES:
        return None
    best = 0.0
    for _ in range(_N_READS):
        began_s, spent_s = monotonic(), process_time()
        try:
            speed = read_bandwidth(n_cores, n_bytes)
        except RuntimeUnavailableError:
            return None
        if speed <= 0:
            return None
        wall_s, spent_s = monotonic() - began_s, process_time() - spent_s
        if spent_s >= _QUIET * (wall_s + (n_cores - 1) * n_bytes / speed):  # one core fills the memory that all read
            best = max(best, speed)
    return best or None


def keep_speed(path: Path, engine: "Engine") -> None:
    """Keep how fast a model's plain steps were, for `kept_speed`, if there were any, and the model was whole.

    Args:
        path: The model's file.
        engine: The engine that wrote with it.
    """
    step_s = engine.curve.seconds(1)
    if step_s and not (engine.plan.given_up or engine.card.lossy or engine.card.adapters):
        with suppress(OSError):  # the file is gone
            key = _speed_key(path)
            speeds = [*_kept(_WRITING, key), 1 / (step_s + engine.curve.beside_s[0])]
            probe_cache.put(cache_folder(), _WRITING, key, speeds[-_N_KEPT:])


def kept_speed(path: Path) -> float | None:
    """Return the tokens a second that a model wrote here without drafts, at best lately; None before it wrote."""
    with suppress(OSError):  # the file is gone
        return max(_kept(_WRITING, _speed_key(path)), default=None)
    return None


def _speed_key(path: Path) -> str:
    from edgedec.gguf.file import file_states  # it imports numpy

    return f"{machine_name()} {usable_cores()} {file_states((path,))}"


def _kept(kind: str, key: str) -> list[float]:
    """Return what was kept of earlier measurements; damaged ones are left out."""
    found = probe_cache.get(cache_folder(), kind, key)
    numbers = found if isinstance(found, list) else []
    return [float(each) for each in numbers if isinstance(each, int | float) and 0 < each < _MOST_SPEED]
