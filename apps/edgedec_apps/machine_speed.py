"""How fast this machine reads memory, and how fast its models wrote, kept in the cache between starts."""

import math
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec.errors import RuntimeUnavailableError
from edgedec.memory.system import available_bytes
from edgedec.processor import machine_name
from edgedec.storage import probe_cache
from edgedec.storage.cache_files import cache_folder
from edgedec_runtimes.shared.cpu_count import usable_cores

if TYPE_CHECKING:
    from edgedec.api.engine import Engine

_WRITING, _N_KEPT = "speed", 5  # the latest of each model
_MOST_BYTES = 1 << 29  # more than any processor's cache holds


def memory_bandwidth(*, measure: bool = True) -> float | None:
    """Return the bytes per second that all usable cores read from memory; None where that was not measured.

    The first calls on a quiet machine measure it, where there is memory for that; the readings are those of memory
    plans (edgedec_runtimes.cpu.tiles.read_rates.memory_rate). Without `measure` it is not measured.
    """
    from edgedec_runtimes.cpu.tiles.read_rates import LEAST_KEPT_BYTES, memory_rate

    available = available_bytes()
    n_bytes = _MOST_BYTES if available is None else min(_MOST_BYTES, available // 8)
    with suppress(RuntimeUnavailableError):
        rate = memory_rate(usable_cores(), n_bytes if measure and n_bytes >= LEAST_KEPT_BYTES else 0, cache_folder())
        return rate if rate < math.inf else None
    return None


def keep_speed(path: Path, engine: "Engine") -> None:
    """Keep how fast a model's plain steps were, for `kept_speed`, if there were any, and the model was whole.

    Args:
        path: The model's file.
        engine: The engine that wrote with it.
    """
    step_s = engine.pool.slots[0].curve.seconds(1)
    if step_s and not (engine.plan.given_up or engine.card.lossy or engine.card.adapters):
        with suppress(OSError):  # the file is gone
            key = _speed_key(path)
            curve = engine.pool.slots[0].curve
            speeds = [*probe_cache.get_numbers(cache_folder(), _WRITING, key), 1 / (step_s + curve.beside_s[0])]
            probe_cache.put(cache_folder(), _WRITING, key, speeds[-_N_KEPT:])


def kept_speed(path: Path) -> float | None:
    """Return the tokens a second that a model wrote here without drafts, at best lately; None before it wrote."""
    with suppress(OSError):  # the file is gone
        return max(probe_cache.get_numbers(cache_folder(), _WRITING, _speed_key(path)), default=None)
    return None


def _speed_key(path: Path) -> str:
    from edgedec.gguf.file import file_states  # it imports numpy

    return f"{machine_name()} {usable_cores()} {file_states((path,))}"
