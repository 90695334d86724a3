"""A virtual environment for optimum, whose version pins exclude current releases of transformers; it is made once.

python = ensure_environment(environment_folder(cache_dir))
"""

import hashlib
import json
import os
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from edgedec.errors import OfflineError, RuntimeUnavailableError
from edgedec.load_options import ResolveOptions
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.storage.cache_files import is_ours
from edgedec_export.optimum.child_process import last_line, run_child
from edgedec_export.training.kinds import CPU_INDEX
from edgedec_models.fetching.lock import locked
from edgedec_models.storage import require_space, storage_errors
from edgedec_runtimes.shared.file_lock import try_lock

TORCH = "torch==2.13.0"
PACKAGES = ("optimum-onnx==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "onnx==1.23.2", "onnxruntime==1.31.1")
"""The packages to install, beside their dependencies: releases that were tested together."""

NEEDED_BYTES = 2_500_000_000
"""Free space on the disk that the installation requires."""

_READY = "ready.json"
Command = list[str | os.PathLike[str]]
_WHAT = "making the environment of optimum"


def environments_folder(cache_dir: Path) -> Path:
    """Return the folder of all such environments, below the root of the cache."""
    return cache_dir / "optimum"


def environment_folder(cache_dir: Path) -> Path:
    """Return the folder of the environment for these packages and this Python, made or not."""
    digest_text = json.dumps([TORCH, *PACKAGES, sys.version_info[:2], sys.base_prefix])
    return environments_folder(cache_dir) / hashlib.sha256(digest_text.encode()).hexdigest()[:16]


def is_ready(folder: Path) -> bool:
    """Tell whether an environment is complete and its Python interpreter exists."""
    return (folder / _READY).is_file() and python_of(folder).exists()


def python_of(folder: Path) -> Path:
    """Return the path of an environment's Python interpreter."""
    scripts = sysconfig.get_path("scripts", "venv", {"base": str(folder)})
    return Path(scripts) / f"python{sysconfig.get_config_var('EXE')}"


def ensure_environment(
    folder: Path, *, offline: bool = False, on_progress: OnProgress | None = None, cancel: CancelToken | None = None
) -> Path:
    """Return the Python interpreter of an environment; make the environment first if needed, which takes minutes.

    Args:
        folder: The folder of the environment; everything in it belongs to edgedec.
        offline: Do not fetch packages.
        on_progress: Called at each step.
        cancel: Stops the installation; nothing of it is left on the disk.

    Raises:
        OfflineError: Packages would have to be fetched.
        RuntimeUnavailableError: The environment cannot be made.
        StorageError: The disk has too little room, or cannot be written.
        CancelledError: `cancel` was cancelled.
    """
    if is_ready(folder):
        return python_of(folder)
    if offline:
        raise OfflineError(
            f"optimum is not installed in {folder}, and the network may not be used; run this once without offline"
        )
    if getattr(sys, "frozen", False):
        raise RuntimeUnavailableError(
            "a frozen application cannot install optimum; install edgedec with pip and export there"
        )
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
        n_bytes: Size of its files.
        is_current: Whether this release of edgedec uses it; others belong to other releases, or are incomplete.
    """

    path: Path
    n_bytes: int
    is_current: bool


def list_environments(cache_dir: Path) -> list[Environment]:
    """Return the environments below the root of the cache, sorted by name.

    Raises:
        StorageError: The folder cannot be read.
    """
    folder, current = environments_folder(cache_dir), environment_folder(cache_dir)
    with storage_errors("list", folder):
        paths = sorted(p.parent for p in folder.glob("*/pyvenv.cfg") if is_ours(p, folder, "optimum"))
        return [Environment(path, _size(path), path == current and is_ready(path)) for path in paths]


def remove_environment(environment: Environment) -> bool:
    """Delete an environment, unless it is being made at the moment; return whether it was deleted.

    Raises:
        StorageError: It cannot be deleted.
    """
    with storage_errors("delete", environment.path):
        lock = try_lock(environment.path)
        if lock is None:
            return False
        with lock:
            shutil.rmtree(environment.path)
    return True


def _size(folder: Path) -> int:
    """Return the size of all files below a folder in bytes; links are not followed."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file())


def _make(folder: Path, on_progress: OnProgress | None, cancel: CancelToken | None) -> None:
    """Make the environment step by step; torch first and alone, from the index whose builds have no CUDA."""
    with storage_errors("make", folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    options = ["--disable-pip-version-check", "--no-input", "--retries=2"]
    pip: Command = [python_of(folder), "-I", "-m", "pip", "install", *options]
    steps: list[Command] = [
        [sys.executable, "-I", "-m", "venv", folder],
        [*pip, "--no-deps", TORCH, *CPU_INDEX],
        [*pip, TORCH, *PACKAGES],
    ]
    log = folder / "install.log"
    for i, command in enumerate(steps):
        report_progress(on_progress, "install", i, len(steps), "%", "torch and optimum")
        if run_child(command, log, what=_WHAT, environment=_environment(), cancel=cancel) != 0:
            raise RuntimeUnavailableError(
                f"the environment of optimum cannot be made: {last_line(log)}; check that Python's venv and pip work "
                "here and reach the package index"
            )
    report_progress(on_progress, "install", len(steps), len(steps), "%", "torch and optimum")
    with storage_errors("write", folder):
        (folder / _READY).write_text(json.dumps([TORCH, *PACKAGES]), encoding="utf-8")


def _environment() -> dict[str, str]:
    """Return our environment variables without those that change where packages are installed or found."""
    unwanted = {"PYTHONPATH", "PYTHONHOME", "PIP_USER", "PIP_TARGET", "PIP_PREFIX", "PIP_REQUIRE_VIRTUALENV"}
    return {name: value for name, value in os.environ.items() if name not in unwanted}
