"""Which files should be in the cache, and whether a file still is what its record says.

A file is hashed once. Afterwards its size and modification time stand for the hash, so that opening it costs nothing.
"""

from dataclasses import dataclass
from pathlib import Path

from edgedec.gguf.places import standing
from edgedec_runtimes.tile_files.record import is_tiled, read_record


@dataclass(frozen=True, slots=True)
class WantedFile:
    """A file that should be in the cache.

    Attributes:
        name: The user's name for it, for messages and progress.
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


def is_recorded(file: WantedFile) -> bool:
    """Tell by the record alone whether the file is there, unchanged, and the one wanted."""
    try:
        stat = standing(file.path).stat()
    except OSError:
        return False
    record = read_record(file.path)
    if record is None or file.size_bytes not in (None, record.size_bytes):
        return False
    is_file = (record.size_bytes, record.mtime_ns) == (stat.st_size, stat.st_mtime_ns)
    is_tiles = record.tiles_mtime_ns == stat.st_mtime_ns and is_tiled(file.path)
    return (is_file or is_tiles) and file.sha256 in (None, record.sha256)
