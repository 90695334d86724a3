"""The folder of an export: made under a temporary name beside its place, complete before it gets its own.

    with new_folder(out, force=False) as folder:
        ...  # write into it; an error or a cancellation leaves nothing behind

`edgedec.json` says what the folder holds: sizes and SHA-256 of every file but itself and the report's.
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
from edgedec.gguf.file import GGUF
from edgedec.gguf.formats import MANIFEST
from edgedec_export.gguf_writer import read_entries, write_gguf
from edgedec_export.temporary import storage_errors, temporary_path

FORMAT = 1


@contextmanager
def new_folder(out: Path, *, force: bool) -> Iterator[Path]:
    """Yield a folder to fill, which becomes `out` when the block ends well, and is deleted when it does not.

    Args:
        out: A path that nothing has, or with `force` that of an earlier export, which stays until the end.

    Raises:
        RequestError: Something else is there, or an export without `force`.
        StorageError: The folder can't be made or written, or the disk is full.
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
    """Return what `edgedec.json` of an export says; None where there is none, or none of ours."""
    try:
        found = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT and "files" in found else None


def write_manifest(folder: Path, facts: Mapping[str, Any], known: Mapping[str, str]) -> None:
    """Write `edgedec.json`: the facts, and size and SHA-256 of every file that the folder holds so far.

    Args:
        known: SHA-256 (hex) by name, of files that need not be read again.

    Raises:
        OSError: A file can't be read or written.
    """
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": known.get(path.name) or _sha256(path)}
        for path in sorted(folder.iterdir())
    }
    text = json.dumps({"format": FORMAT, **facts, "files": files}, indent=2, ensure_ascii=False) + "\n"
    (folder / MANIFEST).write_text(text, encoding="utf-8", newline="\n")


def write_vocabulary(source: GGUF, path: Path) -> None:
    """Write a GGUF with all metadata of another, byte for byte, and none of its tensors.

    Keys that say how a model is split into files are left out.

    Raises:
        ModelFormatError, StorageError: The source changed since it was read, or can't be read; `path` can't be written.
    """
    write_gguf(path, [entry for entry in read_entries(source) if not entry[0].startswith("split.")], [])


def _require_free(out: Path, *, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if read_manifest(out) is None or out.is_symlink():
        raise RequestError(f"{out} is there already and no export of edgedec; choose another folder with --out")
    if not force:
        raise RequestError(f"{out} holds an export already; replace it with --force, or choose another with --out")


def _move(temporary: Path, out: Path, *, force: bool) -> None:
    """Give the finished folder its name; an earlier export goes only when the new one is in its place."""
    _require_free(out, force=force)  # something may have come there meanwhile
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
