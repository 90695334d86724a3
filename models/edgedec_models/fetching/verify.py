"""Check files against their SHA-256, and write down the result."""

import hashlib
import os
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING

from edgedec.errors import ModelFormatError, StorageError
from edgedec.gguf.places import standing, tiled_place
from edgedec.load_options import ResolveOptions
from edgedec.progress import check_cancelled, report_progress
from edgedec_models.record import WantedFile, is_recorded
from edgedec_models.storage import BLOCK_BYTES, storage_errors, write_json
from edgedec_runtimes.tile_files.record import FileRecord, is_tiled, read_record, sidecar

if TYPE_CHECKING:
    from edgedec.gguf.file import GGUF


def write_record(file: WantedFile, sha256: str) -> None:
    """Write the record of a file whose SHA-256 was just computed.

    Raises:
        StorageError: The record cannot be written.
    """
    with storage_errors("look at", file.path):
        stat = standing(file.path).stat()
    now = datetime.now(UTC).isoformat(timespec="seconds")
    record = FileRecord(file.source, sha256, stat.st_size, stat.st_mtime_ns, file.licence, now)
    if (tiled := _tiled(file.path)) is not None:
        before = read_record(file.path) or replace(record, size_bytes=tiled.n_bytes, mtime_ns=0)
        record = replace(before, checked=now, tiles_mtime_ns=stat.st_mtime_ns)
    write_json(sidecar(file.path), asdict(record))
    if tiled is None and file.path.suffix == ".gguf":  # it was fetched again, or made again at last
        with storage_errors("delete", file.path):
            tiled_place(file.path).unlink(missing_ok=True)


def find_fault(file: WantedFile, options: ResolveOptions, *, rehash: bool = False) -> str | None:
    """Return what is wrong with an existing file, for a message; None where nothing is.

    The file is hashed unless its record shows that this was done, or if `rehash`. Where the SHA-256 is neither wanted
    nor recorded, any content is right. A file that is right gets a record.

    Raises:
        StorageError: The file cannot be read.
        CancelledError: `options.cancel` was cancelled.
    """
    if not rehash and is_recorded(file):
        return None
    try:
        tiled = _tiled(file.path)
    except ModelFormatError as error:
        return str(error)
    with storage_errors("look at", file.path):
        size_bytes = standing(file.path).stat().st_size if tiled is None else tiled.n_bytes
    if file.size_bytes not in (None, size_bytes):
        return f"it has {size_bytes} bytes where {file.size_bytes} were expected"
    record = read_record(file.path)
    expected = file.sha256 or (record.sha256 if record else None)
    sha256 = sha256_of(file.path, file.name, options) if tiled is None else _sha256_of_tiled(tiled, file, options)
    if expected not in (None, sha256):
        return f"its SHA-256 is {sha256} where {expected} was expected"
    with suppress(StorageError):  # a cache that is read-only is fine; its files are hashed at each start
        write_record(file, sha256)
    return None


def _tiled(path: Path) -> "GGUF | None":
    """Return the header of the GGUF whose place a tile file took; None where none did."""
    if not is_tiled(path):
        return None
    from edgedec.gguf.file import read_gguf  # here, as it imports numpy

    return read_gguf(path)


def _sha256_of_tiled(tiled: "GGUF", file: WantedFile, options: ResolveOptions) -> str:
    """Return the SHA-256 (hex) of the file whose place a tile file took; one that is damaged has another."""
    from edgedec_runtimes.tile_files.keeping import whole_sha256  # here, as it imports numpy

    def report(_: bytes, done: int) -> None:
        check_cancelled(options.cancel, f"verify {file.name}")
        report_progress(options.on_progress, "verify", done, tiled.n_bytes, "bytes", file.name)

    try:
        return whole_sha256(tiled, report)
    except ModelFormatError as error:
        return f"unknown, as {error}"


def sha256_of(path: Path, label: str, options: ResolveOptions) -> str:
    """Return the SHA-256 of a file in lower case hex, and report progress under `label`.

    Raises:
        StorageError: The file cannot be read.
        CancelledError: `options.cancel` was cancelled.
    """
    with storage_errors("read", path), path.open("rb") as file:
        return digest_of(file, os.fstat(file.fileno()).st_size, label, options).hexdigest()


def digest_of(file: IO[bytes], n_bytes: int, label: str, options: ResolveOptions) -> "hashlib._Hash":
    """Return the SHA-256, as an object that can be continued, of the next n_bytes of an open file.

    Progress is reported under `label`.

    Raises:
        OSError: The file cannot be read.
        CancelledError: `options.cancel` was cancelled.
    """
    digest, done = hashlib.sha256(), 0
    while block := file.read(min(BLOCK_BYTES, n_bytes - done)):
        check_cancelled(options.cancel, f"verify {label}")
        digest.update(block)
        done += len(block)
        report_progress(options.on_progress, "verify", done, n_bytes, "bytes", label)
    return digest
