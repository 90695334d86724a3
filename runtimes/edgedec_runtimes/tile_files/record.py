"""The cache's record of a fetched model: FILE.json beside it, with what the file was when its SHA-256 was computed."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from edgedec.gguf.places import TILE_MAGIC, standing, tiled_place
from edgedec.storage.whole_file import publish, write_atomically
from edgedec_runtimes.shared.file_lock import try_lock

logger = logging.getLogger("edgedec.tiles")


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The content of a record.

    Attributes:
        source: Where the file came from, without credentials.
        sha256: SHA-256 (hex) of the file as it was fetched.
        mtime_ns: Its time of modification.
        licence: Its licence, or "".
        checked: When the record was written, ISO 8601 in UTC.
        tiles_mtime_ns: The time of modification of the tile file that took the file's place, when that was last found
            to be sound; 0 where none did.
        keep_file: Whether no tile file may take the file's place.
    """

    source: str
    sha256: str
    size_bytes: int
    mtime_ns: int
    licence: str
    checked: str
    tiles_mtime_ns: int = 0
    keep_file: bool = False


_KINDS = {"size_bytes": int, "mtime_ns": int, "tiles_mtime_ns": int, "keep_file": bool}
_MAY_LACK = {"tiles_mtime_ns": 0, "keep_file": False}


def sidecar(path: Path) -> Path:
    """Return the path of a file's record."""
    return path.with_name(path.name + ".json")


def read_record(path: Path) -> FileRecord | None:
    """Return the record of a file; None where there is no valid one."""
    value = _MAY_LACK | read_json(sidecar(path))
    if any(type(value.get(name)) is not _KINDS.get(name, str) for name in FileRecord.__slots__):
        return None
    return FileRecord(**{name: value[name] for name in FileRecord.__slots__})  # type: ignore[arg-type]  # just checked


def write_record_of(path: Path, record: FileRecord) -> None:
    """Write the record of a file.

    Raises:
        OSError: It can't be written.
    """
    write_atomically(sidecar(path), json.dumps(asdict(record), indent=1).encode(), sync=True)


def is_tiled(path: Path) -> bool:
    """Tell whether a tile file holds the model at a path; False where nothing can be read."""
    return _has_magic(standing(path))


def _has_magic(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(TILE_MAGIC)) == TILE_MAGIC
    except OSError:
        return False


def rename_tiles(path: Path) -> None:
    """Give a tile file that is called NAME.gguf, as earlier versions called it, its own name; leave any other file.

    It is one renaming. Where it fails, as in a folder that is read-only, the file stays, and is read as it is.
    """
    if path.suffix.lower() != ".gguf" or not _has_magic(path):
        return
    try:
        if (lock := try_lock(path)) is None:  # another process does it
            return
        with lock:
            move_tiles(path)
        logger.info("%s held tiles, which no other program reads: they are %s now", path, tiled_place(path))
    except OSError as error:
        logger.info("%s holds tiles, and can't get the name %s: %s", path, tiled_place(path), error)


def move_tiles(path: Path) -> None:
    """Rename a tile file that is called NAME.gguf; the caller holds its lock (OSError where it can't be renamed)."""
    place = tiled_place(path)
    if _has_magic(path):  # another process may have renamed it
        place.parent.mkdir(exist_ok=True)
        publish(path, place)


def read_json(path: Path) -> dict[str, object]:
    """Return the JSON object in a small file; an empty one where the file is missing or invalid."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
