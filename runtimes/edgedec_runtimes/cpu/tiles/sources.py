"""What is known of a tile file without reading it, in X.json beside X.tiles: which model files it was made from.

A model is known again by path, size and times of all its files, without being read. A file whose times changed, or a
copy at another path, is read once: when its SHA-256 is the one in the head, it joins the sources. So a lost or damaged
X.json costs one reading of the model. The time of the last status change is compared, too, as a copy that keeps the
date of its original (cp -p, tar, rsync) does not keep that one. (On Windows it is the time of creation.)

A tile file whose size and time of modification are those written down has not been written to since it was found to be
sound. With others, or where they are lost, it is read whole once.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path

from edgedec.errors import ModelNotFoundError, StorageError
from edgedec.gguf.file import FileState, file_states
from edgedec.storage.whole_file import write_atomically

_BLOCK_BYTES = 1 << 20


Source = tuple[FileState, ...]
"""The files of a model, in order, as they were when they were last known."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """A tile file's size and time of modification."""

    n_bytes: int
    mtime_ns: int


def is_current(source: Source) -> bool:
    """Tell whether all files of a source are there, and as they were."""
    try:
        return source == file_states(Path(file.path) for file in source)
    except OSError:
        return False


def exists(source: Source) -> bool:
    """Tell whether all files of a source are there, changed or not."""
    return all(os.path.exists(file.path) for file in source)


def sources_path(tile_path: Path) -> Path:
    """Return where the sources of a tile file are written."""
    return tile_path.with_suffix(".json")


def read_sources(tile_path: Path) -> tuple[Source, ...]:
    """Return the sources of a tile file, the latest first; none where they are lost or damaged."""
    try:
        rows = json.loads(sources_path(tile_path).read_text(encoding="ascii"))["sources"]
        return tuple(
            tuple(FileState(str(path), int(size), int(m), int(c)) for path, size, m, c in row) for row in rows if row
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()


def read_stamp(tile_path: Path) -> Stamp | None:
    """Return the stamp that a tile file had when it was found to be sound; None where that is not known."""
    try:
        n_bytes, mtime_ns = json.loads(sources_path(tile_path).read_text(encoding="ascii"))["stamp"]
        return Stamp(int(n_bytes), int(mtime_ns))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def stamp_of(tile_path: Path) -> Stamp:
    """Return the stamp of a tile file as it is now.

    Raises:
        OSError: It can't be looked at.
    """
    found = tile_path.stat()
    return Stamp(found.st_size, found.st_mtime_ns)


def write_sources(tile_path: Path, sources: Iterable[Source], stamp: Stamp | None = None) -> None:
    """Write the sources of a tile file, whole or not at all; `stamp` is that of the sound file, None keeps the old one.

    Raises:
        OSError: They can't be written.
    """
    stamp = stamp or read_stamp(tile_path)
    rows = [[astuple(file) for file in source] for source in sources]
    known = {"sources": rows, "stamp": None if stamp is None else astuple(stamp)}
    write_atomically(sources_path(tile_path), json.dumps(known).encode())


def add_source(tile_path: Path, source: Source, stamp: Stamp | None = None) -> None:
    """Add a source to those of a tile file that are still current; `stamp` as for write_sources.

    Raises:
        OSError: They can't be written.
    """
    others = [other for other in read_sources(tile_path) if other != source and is_current(other)]
    write_sources(tile_path, [source, *others], stamp)


def model_sha256(paths: Iterable[Path], on_bytes: Callable[[int], None]) -> str:
    """Return the SHA-256 of a model's files, one after the other; `on_bytes` is called with the bytes read so far.

    Raises:
        ModelNotFoundError, StorageError: A file is gone, or can't be read.
    """
    digest, n_read = hashlib.sha256(), 0
    block = bytearray(_BLOCK_BYTES)
    for path in paths:
        try:
            with path.open("rb", buffering=0) as file:
                while n := file.readinto(block):
                    digest.update(memoryview(block)[:n])
                    n_read += n
                    on_bytes(n_read)
        except FileNotFoundError as error:
            raise ModelNotFoundError(f"{path}: there is no such file any more; check the directory") from error
        except OSError as error:
            raise StorageError(f"{path}: reading failed ({error.strerror or error}); check the disk") from error
    return digest.hexdigest()
