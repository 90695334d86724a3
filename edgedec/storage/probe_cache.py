"""Answers that took time to find, such as measurements, kept in the cache between starts."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from edgedec import plugins
from edgedec.load_options import LoadOptions
from edgedec.storage.whole_file import write_atomically


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
    machine = f"{platform.machine()} {cpu_name()} {os.cpu_count()}"
    key = f"{machine} {options.n_threads} {options.n_gpu_layers} {options.device}"
    if options.layer_split is not None:
        key = f"{key} {options.layer_split} {options.machines}"
    if options.runtime_options:
        key = f"{key} {sorted(options.runtime_options.items())}"
    return key if options.resident_bytes is None else f"{key} {options.resident_bytes}"


@cache
def cpu_name() -> str:
    """Return the CPU's name, by which machines that share a home folder differ; "" where the system does not say it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
            return named_cpu(lines) or platform.processor()
    except OSError:  # not Linux
        return platform.processor()


def named_cpu(lines: Iterable[str]) -> str:
    """Return the name of a CPU from the lines of /proc/cpuinfo: that of its model or, on Arm, of its cores' designs.

    >>> named_cpu(["processor : 0", "model name : Some CPU @ 2 GHz", "model name : never read"])
    'Some CPU @ 2 GHz'
    >>> named_cpu(["CPU implementer : 0x41", "CPU part : 0xd0b", "CPU implementer : 0x41", "CPU part : 0xd05"])
    '0x41 0xd05 0xd0b'
    """
    parts: set[str] = set()
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
        if key.strip() in ("CPU implementer", "CPU part"):
            parts.add(value.strip())
    return " ".join(sorted(parts))


def cache_folder(cache_dir: Path | None) -> Path:
    """Return the root of the cache: `cache_dir`, or for None this installation's default."""
    root: Path = plugins.load_plugin(plugins.OWN, "cache_folder")() if cache_dir is None else cache_dir
    return root


def _path(cache_dir: Path, kind: str, key: str) -> Path:
    return cache_dir / "probes" / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
