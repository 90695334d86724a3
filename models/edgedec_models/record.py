"""The cache's record of a file: FILE.json beside it, and whether the file still is what its record says.

A file is hashed once. Afterwards its size and modification time stand for the hash, so that opening it costs nothing.
"""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Wanted:
    """A file that should be in the cache.

    Attributes:
        name: The user's name for it, for messages and progress.
        path: Its place.
        source: Where it comes from, without credentials.
        size_bytes: Its size, or None where that is unknown.
        sha256: Its SHA-256 in lower case hex, or None where that is unknown.
        licence: Its licence, or "".
    """

    name: str
    path: Path
    source: str
    size_bytes: int | None = None
    sha256: str | None = None
    licence: str = ""


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The content of a record; `checked` is when it was written, ISO 8601 in UTC."""

    source: str
    sha256: str
    size_bytes: int
    mtime_ns: int
    licence: str
    checked: str


def sidecar(path: Path) -> Path:
    """Return the path of a file's record."""
    return path.with_name(path.name + ".json")


def read_record(path: Path) -> FileRecord | None:
    """Return the record of a file; None where there is no valid one."""
    value = read_json(sidecar(path))
    types = {name: int if name in ("size_bytes", "mtime_ns") else str for name in FileRecord.__slots__}
    if any(type(value.get(name)) is not kind for name, kind in types.items()):
        return None
    return FileRecord(**{name: value[name] for name in types})  # type: ignore[arg-type]  # the types were just checked


def is_recorded(wanted: Wanted) -> bool:
    """Tell by the record alone whether the file is there, unchanged, and the one wanted."""
    try:
        stat = wanted.path.stat()
    except OSError:
        return False
    record = read_record(wanted.path)
    return (
        record is not None
        and (record.size_bytes, record.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
        and wanted.size_bytes in (None, stat.st_size)
        and wanted.sha256 in (None, record.sha256)
    )


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a small file; an empty one where the file is missing or invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
