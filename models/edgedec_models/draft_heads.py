"""Trained draft heads that do not lie beside their model: those of the cache, and those that come with this package.

The cache's folder `heads` has heads that the user put there, and notes of the heads that lie elsewhere: what was
trained here, and what was fetched by name.
"""

import hashlib
import os
from pathlib import Path

from edgedec.errors import StorageError
from edgedec.head_kinds import kind_of
from edgedec.storage.whole_file import write_atomically

HEADS = "heads"
"""The name of the cache's folder of heads."""
_NOTE = ".path"
_MOST_NOTE_BYTES = 1 << 16


def cached_heads(cache_dir: Path | None) -> list[Path]:
    """Return what lies in the cache's folder of heads or is noted there, sorted by name; nothing without a cache."""
    if cache_dir is None:
        return []
    heads = (_noted(path) if path.suffix == _NOTE else path for path in _entries(cache_dir / HEADS))
    return [path for path in heads if path is not None]


def shipped_heads(_cache_dir: Path | None) -> list[Path]:
    """Return the heads that come with this package, sorted by name; there may be none."""
    return _entries(Path(__file__).with_name("heads"))


def remember_head(head: Path, cache_dir: Path) -> None:
    """Note where a head lies, so that it is found for its model wherever the model is.

    Args:
        head: The head, which names its target.
        cache_dir: The cache's root.

    Raises:
        StorageError: The note can't be written.
    """
    path, note = head.absolute(), _note(head, cache_dir)
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(note, os.fsencode(path))
    except OSError as error:
        raise StorageError(
            f"{note}: it can't be written ({error.strerror or error}); check the cache's disk"
        ) from error


def remember_if_head(path: Path, cache_dir: Path) -> None:
    """Note where a file of the cache lies, as `remember_head` does, where it is that of a head that names its target.

    Args:
        path: A GGUF, or a checkpoint's config.json.
        cache_dir: The cache's root.

    Raises:
        StorageError: The note can't be written.
    """
    head = _head(path)
    kind = kind_of(head)
    if kind is not None and kind.trained_for(head) is not None:
        remember_head(head, cache_dir)


def forget_head(path: Path, cache_dir: Path) -> None:
    """Remove the note of a head, which `remember_if_head` made for the same path; nothing happens where there is none.

    Raises:
        StorageError: The note can't be removed.
    """
    note = _note(_head(path), cache_dir)
    try:
        note.unlink(missing_ok=True)
    except OSError as error:
        raise StorageError(f"{note}: it can't be removed ({error.strerror or error}); remove it yourself") from error


def _head(path: Path) -> Path:
    """Return the head that a file belongs to: a GGUF itself, and the folder of any other file."""
    return path if path.suffix == ".gguf" else path.parent


def _note(head: Path, cache_dir: Path) -> Path:
    return cache_dir / HEADS / f"{hashlib.sha256(os.fsencode(head.absolute())).hexdigest()[:16]}{_NOTE}"


def _noted(note: Path) -> Path | None:
    """Return the path that a note holds; None where it can't be read."""
    try:
        with note.open("rb") as file:
            return Path(os.fsdecode(file.read(_MOST_NOTE_BYTES)))
    except (OSError, ValueError):
        return None


def _entries(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted by name; nothing for a folder that does not exist."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
