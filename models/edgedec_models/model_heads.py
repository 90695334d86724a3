"""Draft heads beside a model's file: the catalogue's, and one that went on learning on this machine."""

import os
from pathlib import Path

from edgedec.errors import RequestError
from edgedec.head_kinds import find_head
from edgedec.load_options import ResolveOptions
from edgedec.plugins import HEAD_KINDS, plugins
from edgedec.storage.cache_files import cache_folder
from edgedec.storage.whole_file import write_atomically
from edgedec_models.catalogue import Entry
from edgedec_models.draft_heads import remember_if_head
from edgedec_models.entries import pull_entry
from edgedec_models.folders import flat_path, models_folder
from edgedec_models.storage import storage_errors
from edgedec_runtimes.trained_heads.kind import places


def head_path(entry: Entry, options: ResolveOptions) -> Path:
    """Return where the cache keeps the head of a model of the catalogue: beside the models, as NAME.head.gguf."""
    return flat_path(f"{entry.name}.head", models_folder(options.cache_dir))


def bring_head(entry: Entry, model: Path, options: ResolveOptions, *, force: bool = False) -> Path | None:
    """Return the draft head that a model is used with, after fetching the catalogue's one where there is none.

    Only a head that is one file with a known checksum comes with its model. None where there is no head.

    Args:
        model: The model's file.
        force: Verify the catalogue's head again where it is there.

    Raises:
        ModelFormatError, PullError, OfflineError, StorageError, CancelledError: The head could not be fetched.
    """
    root, path, head = cache_folder(options.cache_dir), head_path(entry, options), entry.head
    present = find_head(model, plugins(HEAD_KINDS), root)
    if head is None or head.reference is not None or (present is not None and not (force and present == path)):
        return present
    pull_entry(head, path, options, force=force)
    remember_if_head(path, root)
    return path


def take_head(head: Path, model: Path) -> None:
    """Put a head's file beside a model, where it is looked for first; what was there before the first one is kept.

    Raises:
        StorageError: A file can't be written.
    """
    place, before = _places(model)
    with storage_errors("replace", place):
        if not before.exists():  # an empty one says that no file was there
            write_atomically(before, place.read_bytes() if place.exists() else b"", sync=True)
        write_atomically(place, head.read_bytes(), sync=True)


def go_back(model: Path) -> None:
    """Undo every take_head() for a model (RequestError: there was none; StorageError: a file can't be renamed)."""
    place, before = _places(model)
    if not before.exists():
        raise RequestError(f"no head of {model.stem} has learned: there is no {before}")
    with storage_errors("restore", place):
        os.replace(before, place)
        if not place.stat().st_size:
            place.unlink()


def _places(model: Path) -> tuple[Path, Path]:
    place = places(model)[0]
    return place, place.with_name(f"{place.name}.before")
