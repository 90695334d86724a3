"""Small answers that took time to find, kept in the cache between starts."""

import hashlib
import json
import os
import platform
from contextlib import suppress
from pathlib import Path
from typing import Any

from edgedec import plugins
from edgedec.model import LoadOptions


def recall(cache_dir: Path | None, kind: str, key: str) -> Any:
    """Return what was remembered under that key, or None: absent, damaged, or there is no cache."""
    if cache_dir is None:
        return None
    try:
        return json.loads(_path(cache_dir, kind, key).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def remember(cache_dir: Path | None, kind: str, key: str, value: Any) -> None:
    """Write a value of plain JSON types; without a writable cache it is found out again next time."""
    if cache_dir is None:
        return
    path = _path(cache_dir, kind, key)
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(value), encoding="utf-8")
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()


def machine_key(options: LoadOptions) -> str:
    """Name what a measured time depends on besides the model: the machine, threads and device."""
    return f"{platform.machine()} {os.cpu_count()} {options.n_threads} {options.n_gpu_layers} {options.device}"


def cache_folder(cache_dir: Path | None) -> Path:
    """Return the root of the cache: `cache_dir`, or where this installation keeps it."""
    root: Path = plugins.load_plugin(plugins.FOLDERS, "cache")() if cache_dir is None else cache_dir
    return root


def _path(cache_dir: Path, kind: str, key: str) -> Path:
    return cache_dir / "probes" / f"{kind}-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
