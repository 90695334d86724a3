"""The folder of tile files: listing it and deleting from it, without reading a model or mapping tiles.

Below the cache's root:

    tiles/KEY.SHA.tiles   tiles of one model in one layout: KEY names header, size and layout, SHA the model's bytes
    tiles/KEY.SHA.json    the files that the tiles were made from; its time is that of the tiles' last use
    tiles/KEY.partial     tiles that are being written, under the lock tiles/KEY.lock
"""

import logging
import os
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edgedec.errors import ModelFormatError, as_storage_error
from edgedec.gguf.tile_header import read_tile_header
from edgedec.storage.cache_files import is_ours
from edgedec_runtimes.cpu.tiles.sources import Source, exists, is_current, read_sources, sources_path, write_sources
from edgedec_runtimes.shared.file_lock import try_lock
from edgedec_runtimes.shared.pages import is_mapped

logger = logging.getLogger("edgedec.tiles")
logger.addHandler(logging.NullHandler())

State = Literal["current", "changed", "missing", "damaged", "unfinished"]


@dataclass(frozen=True, slots=True)
class TileEntry:
    """A tile file.

    Attributes:
        models: The first file of each model that the tiles were made from or found to be of.
        layout: Version of the arrangement; "" where the header can't be read.
        n_bytes: The size of the tile file.
        last_used_s: When a process last mapped it, in seconds since 1970.
        state: "current": a model is there and unchanged. "changed": a model is there with other times or size, and
            would be read once to find out whether it is the same. "missing": no such model is there. "damaged": the
            header of the tile file is damaged. "unfinished": the file is being written, or a killed process left it.
    """

    path: Path
    models: tuple[Path, ...]
    layout: str
    n_bytes: int
    last_used_s: float
    state: State


def tiles_folder(cache_dir: Path) -> Path:
    """Return the folder of tile files below the cache's root."""
    return cache_dir / "tiles"


def tile_paths(folder: Path, suffix: str = ".tiles") -> list[Path]:
    """Return edgedec's files with a suffix in the folder, sorted by name; none where there is no folder.

    Raises:
        OSError: The folder can't be read.
    """
    try:
        root = folder.resolve()  # the folder that is written to may be a link
        names = sorted(name for name in os.listdir(root) if name.endswith(suffix))
        return [folder / name for name in names if is_ours(root / name, root, "tiles")]
    except (FileNotFoundError, NotADirectoryError):
        return []


def list_tiles(cache_dir: Path) -> list[TileEntry]:
    """Return the tile files below the cache's root `cache_dir`, the one used last first.

    Raises:
        StorageError: The folder can't be read.
    """
    folder = tiles_folder(cache_dir)
    with _storage_errors("list", folder):
        entries = [*map(_entry, tile_paths(folder)), *map(_unfinished, tile_paths(folder, ".partial"))]
    return sorted((entry for entry in entries if entry is not None), key=lambda entry: (-entry.last_used_s, entry.path))


def prune_tiles(
    cache_dir: Path, *, everything: bool = False, layouts: Collection[str] | None = None
) -> list[TileEntry]:
    """Delete all tile files but the current ones, and return what was deleted.

    A file that a process is writing stays, and so does all behind a link. A deleted file stays valid for the processes
    that have mapped it.

    Args:
        cache_dir: The cache's root.
        everything: Delete the current files, too.
        layouts: The layouts in use: files of other layouts are deleted, too. None: all layouts are in use.

    Raises:
        StorageError: A file can't be deleted.
    """
    folder = tiles_folder(cache_dir)
    removed = list[TileEntry]()
    if folder.is_symlink():
        return removed
    for entry in list_tiles(cache_dir):
        outdated = layouts is not None and entry.layout not in layouts
        if (everything or outdated or entry.state != "current") and _delete_entry(entry):
            removed.append(entry)
    with _storage_errors("delete from", folder):
        _sweep(folder)
    return removed


def remove_tiles_of(cache_dir: Path, path: Path) -> int:
    """Delete the tiles of the model that has a file at `path`, and return the bytes that this freed.

    Tiles stay where an unchanged copy of the model elsewhere uses them. The model itself may be gone already.

    Raises:
        StorageError: A file can't be deleted.
    """
    real = _real(path)
    return _remove_where(cache_dir, lambda source: any(_real(Path(file.path)) == real for file in source))


def remove_outdated(cache_dir: Path, source: Source) -> int:
    """Delete the tiles of other models that were at the paths of `source`, and return the bytes that this freed.

    Raises:
        StorageError: A file can't be deleted.
    """
    paths = [file.path for file in source]
    return _remove_where(cache_dir, lambda other: other != source and [file.path for file in other] == paths)


def remove_missing(cache_dir: Path) -> int:
    """Delete the tiles whose models are gone, and return the bytes freed. Tiles of unknown models stay.

    Raises:
        StorageError: A file can't be deleted.
    """
    gone = [entry for entry in list_tiles(cache_dir) if entry.state == "missing" and entry.models]
    return sum(delete_tile_file(entry.path) for entry in gone)


def delete_tile_file(path: Path) -> int:
    """Delete a tile file and its sources, and return the bytes freed; 0 where it is gone, or can't be as it is mapped.

    Raises:
        StorageError: It can't be deleted.
    """
    with _storage_errors("delete", path):
        try:
            n_bytes = path.stat().st_size
            path.unlink()
            sources_path(path).unlink(missing_ok=True)
        except FileNotFoundError:
            return 0
        except OSError as error:
            if not is_mapped(error):
                raise
            logger.warning("%s is in use by another process and stays; end that one first", path)
            return 0
    return n_bytes


def _remove_where(cache_dir: Path, unwanted: Callable[[Source], bool]) -> int:
    folder, n_freed = tiles_folder(cache_dir), 0
    with _storage_errors("delete from", folder):
        for path in tile_paths(folder):
            sources = read_sources(path)
            remaining = [source for source in sources if not unwanted(source)]
            if len(remaining) == len(sources):
                continue
            if any(map(is_current, remaining)):
                write_sources(path, remaining)
            else:
                n_freed += delete_tile_file(path)
    return n_freed


def _entry(path: Path) -> TileEntry | None:
    try:
        n_bytes, last_used_s = path.stat().st_size, _last_used_s(path)
        sources = read_sources(path)
        layout = read_tile_header(path).layout
    except FileNotFoundError:
        return None  # deleted meanwhile
    except ModelFormatError:
        return TileEntry(path, _models(sources), "", n_bytes, last_used_s, "damaged")
    return TileEntry(path, _models(sources), layout, n_bytes, last_used_s, _state(sources))


def _models(sources: tuple[Source, ...]) -> tuple[Path, ...]:
    return tuple(Path(source[0].path) for source in sources)


def _last_used_s(path: Path) -> float:
    """Return when tiles were last used.

    It is the time of their sources: if it were their own, each use would make backups copy them again.
    """
    try:
        return sources_path(path).stat().st_mtime
    except FileNotFoundError:
        return path.stat().st_mtime


def _state(sources: tuple[Source, ...]) -> State:
    if any(map(is_current, sources)):
        return "current"
    return "changed" if any(map(exists, sources)) else "missing"


def _unfinished(path: Path) -> TileEntry | None:
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return TileEntry(path, (), "", status.st_size, status.st_mtime, "unfinished")


def _delete_entry(entry: TileEntry) -> bool:
    """Delete a tile file unless it is being written; return whether it is gone."""
    if entry.state != "unfinished":
        return delete_tile_file(entry.path) > 0
    with _storage_errors("delete", entry.path):
        lock = try_lock(entry.path.with_suffix(""))
        if lock is None:
            return False
        with lock:
            entry.path.unlink(missing_ok=True)
    return True


def _sweep(folder: Path) -> None:
    """Delete what killed processes left: sources without tiles, half-written sources, locks that nobody holds."""
    for path in tile_paths(folder, ".json"):
        if not path.with_suffix(".tiles").exists():
            path.unlink(missing_ok=True)
    for path in tile_paths(folder, ".tmp"):
        path.unlink(missing_ok=True)
    for path in tile_paths(folder, ".lock"):
        if lock := try_lock(path.with_suffix("")):
            lock.release()


def _real(path: Path) -> str:
    """Return a path with the links among its folders resolved. The file itself may be gone or be a link: it stays."""
    return os.path.join(os.path.realpath(path.parent), path.name)


def _storage_errors(doing: str, path: Path) -> AbstractContextManager[None]:
    return as_storage_error(f"cannot {doing} {path}", "check its permissions and the disk")
