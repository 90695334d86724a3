"""The build for pip: scikit-build-core's, with a build folder that is kept, so that what is compiled stays compiled.

The folder is build/KIND-HASH in the sources; the hash is of what chooses a compiler and its flags. An installation that
finds the folder in use, or can't write there, builds in a temporary one, as scikit-build-core does by itself.
"""

import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (  # the hooks that need no build folder
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

Settings = dict[str, Any]

_CHOOSES = (
    "CC",
    "CXX",
    "CFLAGS",
    "CXXFLAGS",
    "LDFLAGS",
    "ARCHFLAGS",
    "MACOSX_DEPLOYMENT_TARGET",
    "_PYTHON_HOST_PLATFORM",
)


def build_wheel(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel; the hook of PEP 517."""
    with _kept_folder(config_settings) as settings:
        return _build.build_wheel(wheel_directory, settings, metadata_directory)


def build_editable(
    wheel_directory: str, config_settings: Settings | None = None, metadata_directory: str | None = None
) -> str:
    """Build a wheel that refers to the sources; the hook of PEP 660."""
    with _kept_folder(config_settings) as settings:
        return _build.build_editable(wheel_directory, settings, metadata_directory)


@contextmanager
def _kept_folder(config: Settings | None) -> Iterator[Settings]:
    """Yield the settings with the kept build folder, which is locked meanwhile; as they are where it can't be had."""
    settings = dict(config or {})
    folder = Path("build", f"{sysconfig.get_platform()}-{_hash(settings)}").absolute()
    lock = None if "build-dir" in settings else _locked(folder.with_suffix(".lock"))
    if lock is None:
        yield settings
        return
    try:
        yield settings | {"build-dir": str(folder)}
    finally:
        os.close(lock)


def _hash(settings: Settings) -> str:
    """Return a hash of what chooses the compiler, its flags and the generator."""
    names = sorted(name for name in os.environ if name in _CHOOSES or name.startswith(("CMAKE_", "SKBUILD_")))
    chosen = [*((name, os.environ[name]) for name in names), *sorted(settings.items())]
    return hashlib.sha256(repr(chosen).encode()).hexdigest()[:8]


def _locked(path: Path) -> int | None:
    """Return the open file of a lock, which ends with the file; None where another has it, or it can't be made."""
    try:
        path.parent.mkdir(exist_ok=True)
        file = os.open(path, os.O_RDWR | os.O_CREAT)
    except OSError:
        return None
    try:
        if sys.platform == "win32":
            import msvcrt

            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        return None
    return file
