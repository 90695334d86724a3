"""Answers that took time to find, such as measurements, kept in the cache between starts.

A time is kept only where no other program took the processor meanwhile, as `quietly` tells: a busy machine is measured
again at a later start.
"""

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar

from edgedec.load_options import LoadOptions
from edgedec.processor import machine_name
from edgedec.storage.whole_file import write_atomically

T = TypeVar("T")

_USUAL_S, _USUAL_SHARE = 0.02, 0.1  # that threads wait on a quiet machine, whose system also has something to do

_MOST_NUMBER = 1e14  # more than any speed


def quiet_from_now() -> Callable[[], bool]:
    """Return a function that tells whether other programs left us the processor since now; True but on Linux."""
    before, started = _waited_s(), perf_counter()
    return lambda: _waited_s() - before <= _USUAL_S + _USUAL_SHARE * (perf_counter() - started)


def quietly(measure: Callable[[], T]) -> tuple[T, bool]:
    """Return what a measurement returns, and whether other programs left it the processor."""
    is_quiet = quiet_from_now()
    return measure(), is_quiet()


def _waited_s() -> float:
    """Return how long the threads of this process waited for a processor so far, all together."""
    waited_ns = 0
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError, ValueError, IndexError):  # the thread has ended
            waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9


def get(cache_dir: Path | None, kind: str, key: str) -> Any:
    """Return the value that `put` kept under a key; None where there is none, it is damaged, or there is no cache.

    Args:
        cache_dir: The cache's root; None for no cache.
        kind: What the value is of, the beginning of its file's name.
        key: All that the value depends on.
    """
    if cache_dir is None:
        return None
    try:
        return json.loads(_path(cache_dir, kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def get_numbers(cache_dir: Path | None, kind: str, key: str) -> list[float]:
    """Return the list of positive numbers that `put` kept under a key, without those that are damaged; as get()."""
    stored = get(cache_dir, kind, key)
    numbers = stored if isinstance(stored, list) else []
    return [float(each) for each in numbers if isinstance(each, int | float) and 0 < each < _MOST_NUMBER]


def put(cache_dir: Path | None, kind: str, key: str, value: Any) -> None:
    """Keep a value of plain JSON types under a key, as `get` takes it; do nothing where the cache can't be written."""
    if cache_dir is None:
        return
    path = _path(cache_dir, kind, key)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(value).encode())


def machine_key(options: LoadOptions) -> str:
    """Return a key of all that a measured time depends on besides the model.

    That is the machine, the threads, the device, and the runtime's own options.
    """
    machine = f"{machine_name()} {os.cpu_count()}"
    key = f"{machine} {options.n_threads} {options.n_gpu_layers} {options.device}"
    if options.layer_split is not None:
        key = f"{key} {options.layer_split} {options.machines}"
    if options.runtime_options:
        key = f"{key} {sorted(options.runtime_options.items())}"
    return key if options.resident_bytes is None else f"{key} {options.resident_bytes}"


def _path(cache_dir: Path, kind: str, key: str) -> Path:
    return cache_dir / "probes" / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
