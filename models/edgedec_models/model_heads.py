"""The draft head that the catalogue has for a model: a small file comes with it, others are asked for."""

from pathlib import Path

from edgedec.head_kinds import find_head
from edgedec.load_options import ResolveOptions
from edgedec.plugins import HEAD_KINDS, plugins
from edgedec.storage.cache_files import cache_folder
from edgedec_models.catalogue import Entry
from edgedec_models.draft_heads import remember_if_head
from edgedec_models.entries import pull_entry
from edgedec_models.folders import flat_path, models_folder


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
