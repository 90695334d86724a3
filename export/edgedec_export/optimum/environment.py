"""A virtual environment of its own for optimum, whose pins exclude current releases of transformers; made once.

python = ensure_environment(environment_folder(cache_dir))
"""

import hashlib
import json
import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from edgedec.errors import OfflineError, RuntimeUnavailableError
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.resolver import ResolveOptions
from edgedec.storage.file_lock import try_lock
from edgedec_export.optimum.child_process import last_line, run_child
from edgedec_models.lock import locked
from edgedec_models.storage import require_space, storage_errors

TORCH = "torch==2.13.0"
PACKAGES = ("optimum-onnx==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "onnx==1.23.2", "onnxruntime==1.31.1")
"""What is installed, with what these need: releases that were tried together."""

NEEDED_BYTES = 2_500_000_000
"""Room on the disk that is asked for."""

_CPU_INDEX = "https://download.pytorch.org/whl/cpu"  # on Linux: PyPI's torch there brings gigabytes of CUDA
_READY = "ready.json"
Command = list[str | os.PathLike[str]]
_WHAT = "making the environment of optimum"


def environments_folder(cache_dir: Path) -> Path:
    """Return the folder of these environments below the cache's root."""
    return cache_dir / "optimum"


def environment_folder(cache_dir: Path) -> Path:
    """Return the place of the environment with these packages and this Python, made or not."""
    wanted = json.dumps([TORCH, *PACKAGES, sys.version_info[:2], sys.base_prefix])
    return environments_folder(cache_dir) / hashlib.sha256(wanted.encode()).hexdigest()[:16]


def is_ready(folder: Path) -> bool:
    """Tell whether an environment was made to its end, and its Python is there."""
    return (folder / _READY).is_file() and python_of(folder).exists()


def python_of(folder: Path) -> Path:
    """Return the interpreter of an environment."""
    return folder / ("Scripts/python.exe" if sys.platform == "win32" else "bin/python")


def ensure_environment(
    folder: Path, *, offline: bool = False, on_progress: OnProgress | None = None, cancel: CancelToken | None = None
) -> Path:
    """Return the interpreter of an environment, which is made where it is not there; that takes minutes.

    Args:
        folder: Its place, of which edgedec owns everything.
        offline: Don't fetch packages.
        on_progress: Told of each step.
        cancel: Stops it; nothing is left behind.

    Raises:
        OfflineError: Packages would have to be fetched.
        RuntimeUnavailableError: The environment can't be made, and why.
        StorageError: The disk has no room for it, or can't be written.
        CancelledError: It was cancelled.
    """
    if is_ready(folder):
        return python_of(folder)
    if offline:
        raise OfflineError(f"optimum is not on this machine ({folder}), and fetching it was ruled out; go online once")
    if getattr(sys, "frozen", False):
        raise RuntimeUnavailableError("a frozen application can't install optimum; export with edgedec from pip")
    with locked(folder, "optimum's packages", ResolveOptions(on_progress=on_progress, cancel=cancel)):
        if not is_ready(folder):
            require_space(folder.parent, NEEDED_BYTES, "optimum's packages")
            try:
                _make(folder, on_progress, cancel)
            finally:
                if not is_ready(folder):
                    shutil.rmtree(folder, ignore_errors=True)
    return python_of(folder)


@dataclass(frozen=True, slots=True)
class Environment:
    """An environment on the disk.

    Attributes:
        n_bytes: What its files take.
        is_current: Whether this release uses it; others are of other releases, or unfinished.
    """

    path: Path
    n_bytes: int
    is_current: bool


def list_environments(cache_dir: Path) -> list[Environment]:
    """Return the environments below the cache's root, by name.

    Raises:
        StorageError: The folder can't be read.
    """
    folder, current = environments_folder(cache_dir), environment_folder(cache_dir)
    with storage_errors("list", folder):
        paths = sorted(path for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
        return [Environment(path, _size(path), path == current and is_ready(path)) for path in paths]


def remove_environment(environment: Environment) -> bool:
    """Delete an environment and tell whether it is gone; one that is being made at the moment stays.

    Raises:
        StorageError: It can't be deleted.
    """
    with storage_errors("delete", environment.path):
        lock = try_lock(environment.path)
        if lock is None:
            return False
        with lock:
            shutil.rmtree(environment.path)
    return True


def _size(folder: Path) -> int:
    """Return the bytes of all files below a folder, links not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _make(folder: Path, on_progress: OnProgress | None, cancel: CancelToken | None) -> None:
    """Make the environment step by step; torch by itself, from the index that has it without CUDA."""
    with storage_errors("make", folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    options = ["--disable-pip-version-check", "--no-input", "--retries=2"]
    pip: Command = [python_of(folder), "-I", "-m", "pip", "install", *options]
    index = ["--index-url", _CPU_INDEX] if sys.platform == "linux" else []
    steps: list[Command] = [
        [sys.executable, "-I", "-m", "venv", folder],
        [*pip, "--no-deps", TORCH, *index],
        [*pip, TORCH, *PACKAGES],
    ]
    log = folder / "install.log"
    for i, command in enumerate(steps):
        report_progress(on_progress, "install", i, len(steps), "%", "torch and optimum")
        if run_child(command, log, what=_WHAT, environment=_environment(), cancel=cancel) != 0:
            raise RuntimeUnavailableError(
                f"the environment of optimum can't be made: {last_line(log)}; Python's venv and pip must work here, "
                "and the packages be reached"
            )
    report_progress(on_progress, "install", len(steps), len(steps), "%", "torch and optimum")
    with storage_errors("write", folder):
        (folder / _READY).write_text(json.dumps([TORCH, *PACKAGES]), encoding="utf-8")


def _environment() -> dict[str, str]:
    """Return this process's environment without what changes where packages are installed or found."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    return {name: value for name, value in os.environ.items() if name not in unwanted}
