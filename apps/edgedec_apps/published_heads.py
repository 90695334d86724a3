"""A published draft head of the catalogue, made ready for the model that it was trained for."""

from dataclasses import replace
from pathlib import Path

from edgedec.errors import OfflineError
from edgedec.load_options import ResolveOptions
from edgedec_models.catalogue import Entry
from edgedec_models.model_heads import head_path


def make_head(entry: Entry, reference: str, model: Path, options: ResolveOptions) -> Path:
    """Fetch a published head, write it as a GGUF that names the model, and return that, which `--draft auto` finds.

    The GGUF has a quarter of a checkpoint's bytes. A checkpoint that was fetched for it is deleted.

    Args:
        reference: The hf: name of its head.
        model: The model's file.

    Raises:
        ModelNotFoundError, PullError, OfflineError, StorageError, CancelledError: The head could not be fetched.
        UnsupportedModelError: The head does not fit the model, or a GGUF can't express it.
    """
    from edgedec.gguf.file import read_gguf
    from edgedec.storage.cache_files import cache_folder
    from edgedec_export.head_to_gguf import write_head_gguf
    from edgedec_models.cache import remove_model
    from edgedec_models.draft_heads import remember_head
    from edgedec_models.fetching.verify import sha256_of, write_record
    from edgedec_models.record import WantedFile
    from edgedec_models.resolve import pull
    from edgedec_runtimes.trained_heads.load import load_head
    from edgedec_runtimes.trained_heads.target import target_of

    was_here = _is_here(reference, options)
    source, target, path = pull(reference, options), read_gguf(model), head_path(entry, options)
    head = load_head(source)
    renamed = replace(head, card=replace(head.card, name=path.stem, target=target_of(target, options.cache_dir)))
    write_head_gguf(renamed, target, path, force=True, on_progress=options.on_progress, cancel=options.cancel)
    licence = "" if entry.head is None else entry.head.licence
    write_record(WantedFile(path.stem, path, reference, licence=licence), sha256_of(path, path.stem, options))
    remember_head(path, cache_folder(options.cache_dir))
    if not was_here:
        remove_model(reference, options.cache_dir)
    return path


def _is_here(reference: str, options: ResolveOptions) -> bool:
    from edgedec_models.resolve import pull

    try:
        pull(reference, replace(options, offline=True))
    except OfflineError:
        return False
    return True
