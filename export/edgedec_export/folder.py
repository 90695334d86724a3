"""The folder of an export: written under a temporary name beside its place, and renamed when it is complete.

    with new_folder(out, force=False) as folder:
        ...  # write into it; an error or a cancellation leaves nothing behind

`edgedec.json`, the manifest, says what the folder holds: facts of the model, and size and SHA-256 of every file except
the manifest itself and the report.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from edgedec.errors import RequestError
from edgedec.gguf.file import GGUF, MANIFEST
from edgedec_export.gguf_writer import Metadata, read_entries, write_gguf
from edgedec_export.temporary import storage_errors, temporary_path

FORMAT = 1


@contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a folder to fill. It becomes `out` when the block ends without an error, and is deleted otherwise.

    Args:
        out: A path that does not exist. With `force` it may be an earlier export, which stays until the new one is
            complete.

    Raises:
        RequestError: `out` is something else than an export, or is an export and `force` is false.
        StorageError: The folder cannot be created or written, or the disk is full.
    """
    out = out.absolute()
    _require_free(out, force=force)
    with storage_errors(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    with temporary_path(out) as temporary:
        temporary.mkdir()
        yield temporary
        _move(temporary, out, force=force)


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest of an export; None where the folder has none, or one of another format."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == FORMAT and "files" in manifest else None


def write_manifest(folder: Path, facts: Mapping[str, Any], hashes: Mapping[str, str]) -> None:
    """Write the manifest: the facts, and size and SHA-256 of every file that the folder holds so far.

    Args:
        hashes: SHA-256 (hex) by file name, of files that need not be read again.

    Raises:
        OSError: A file cannot be read or written.
    """
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": hashes.get(path.name) or _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({"format": FORMAT, **facts, "files": files}, indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8", newline="\n")


def write_vocabulary(source: GGUF, path: Path, more: Metadata | None = None) -> None:
    """Write a GGUF with all metadata of another one, byte for byte, and without tensors.

    Keys that say how the source is split into files are left out.

    Args:
        source: The other GGUF.
        path: Where to write.
        more: Metadata to add, which replaces that of the source under the same keys.

    Raises:
        ModelFormatError, StorageError: The source has changed since it was opened, or cannot be read.
        OSError: `path` cannot be written.
    """
    entries = {key: value for key, value in read_entries(source).items() if not key.startswith("split.")}
    write_gguf(path, entries | (more or {}), [])


def _require_free(out: Path, *, force: bool) -> None:
    """Raise RequestError unless `out` does not exist, or is an export that `force` allows to replace."""
    if not os.path.lexists(out):
        return
    if read_manifest(out) is None or out.is_symlink():
        raise RequestError(f"{out} exists and is not an export of edgedec; choose another folder with --out")
    if not force:
        raise RequestError(
            f"{out} already holds an export; replace it with --force, or choose another folder with --out"
        )


def _move(temporary: Path, out: Path, *, force: bool) -> None:
    """Rename the finished folder to `out`; an earlier export there is deleted only after that."""
    _require_free(out, force=force)  # again: it may have been created meanwhile
    if not out.exists():
        temporary.rename(out)
        return
    aside = temporary.with_suffix(".old")
    out.rename(aside)
    try:
        temporary.rename(out)
    except OSError:
        aside.rename(out)
        raise
    with suppress(OSError):
        shutil.rmtree(aside)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
