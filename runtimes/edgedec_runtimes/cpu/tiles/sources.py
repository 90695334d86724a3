"""The facts in X.json beside X.tiles: the model files that the tiles are known to be of, and when they were sound.

A model is recognised by the states of all its files (FileState), without being read. A file whose times changed, or a
copy at another path, is read once: if its SHA-256 is the one in the tile file's header, its state joins the sources. So
a lost or damaged X.json costs one reading of the model.

The stamp is the size and the modification time that the tile file had when it was last found to be sound. While it has
them it has not been written to. A tile file with others, or whose stamp is lost, is read whole once.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from edgedec.errors import ModelNotFoundError, StorageError
from edgedec.gguf.file import FileState, file_states
from edgedec.gguf.places import standing
from edgedec.storage.whole_file import write_atomically

_BLOCK_BYTES = 1 << 20


Source = tuple[FileState, ...]
"""The files of a model, in order, as they were when they were last known."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """The size and the modification time of a tile file."""

    n_bytes: int
    mtime_ns: int


def is_current(source: Source) -> bool:
    """Return whether all files of a source are there and unchanged."""
    try:
        return source == file_states(Path(file.path) for file in source)
    except OSError:
        return False


def exists(source: Source) -> bool:
    """Return whether all files of a source are there, changed or not."""
    return all(os.path.exists(standing(Path(file.path))) for file in source)


def sources_path(tile_path: Path) -> Path:
    """Return the path of the file that holds the sources and the stamp of a tile file."""
    return tile_path.with_suffix(".json")


def read_sources(tile_path: Path) -> tuple[Source, ...]:
    """Return the sources of a tile file, the latest first; none where they are lost or damaged."""
    try:
        rows = _read(tile_path)["sources"]
        return tuple(
            tuple(FileState(str(path), int(size), int(m), int(c)) for path, size, m, c in row) for row in rows if row
        )
    except (ValueError, KeyError, TypeError):
        return ()


def read_stamp(tile_path: Path) -> Stamp | None:
    """Return the stamp that a tile file had when it was last found to be sound; None where that is not known."""
    try:
        n_bytes, mtime_ns = _read(tile_path)["stamp"]
        return Stamp(int(n_bytes), int(mtime_ns))
    except (ValueError, KeyError, TypeError):
        return None


def _read(tile_path: Path) -> Any:
    """Return the JSON beside a tile file; an empty object where it is lost or damaged."""
    try:
        return json.loads(sources_path(tile_path).read_text(encoding="ascii"))
    except (OSError, ValueError, RecursionError):
        return {}


def write_sources(tile_path: Path, sources: Iterable[Source], stamp: Stamp | None = None) -> None:
    """Replace the sources of a tile file, and its stamp; None keeps the stamp that was written before.

    Raises:
        OSError: They can't be written.
    """
    stamp = stamp or read_stamp(tile_path)
    rows = [[astuple(file) for file in source] for source in sources]
    document = {"sources": rows, "stamp": None if stamp is None else astuple(stamp)}
    write_atomically(sources_path(tile_path), json.dumps(document).encode())


def add_source(tile_path: Path, source: Source, stamp: Stamp | None = None) -> None:
    """Add a source to the sources of a tile file and drop those that are not current; `stamp` as in write_sources.

    Raises:
        OSError: They can't be written.
    """
    others = [other for other in read_sources(tile_path) if other != source and is_current(other)]
    write_sources(tile_path, [source, *others], stamp)


def model_sha256(paths: Iterable[Path], on_bytes: Callable[[int], None]) -> str:
    """Return the SHA-256 (hex) of a model's files, one after another; `on_bytes` gets the number of bytes read so far.

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
