"""The tile cache: a model's matrices are rearranged once, written to a file and mapped by later starts.

    tiles = open_tiles(Job(gguf, tensors, "layout", fill, cache_dir=root))
    tiles["blk.0.attn_q.weight"].ctypes.data

A tile file is found by the model's header, the model's size and the layout. It is taken if the model's files are
unchanged since it was made from them; else the model is read once and its SHA-256 is compared (tiles.sources). So the
tiles of a model that was moved, copied or touched stay in use, and models that differ in nothing but weights are never
mixed up. Not noticed are weights that were changed in place while the size and both times of the file stayed.

A tile file that was written to after it was made is read whole, and made anew where it is damaged. Damage that leaves
no trace in the file's times (a failing disk) is found by `Tiles.verify`. Where no disk takes the file, the tiles are
made in private memory at each start, and the log says why.
"""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from edgedec.errors import ModelFormatError, ModelNotFoundError, StorageError
from edgedec.gguf.file import file_states
from edgedec.memory_plan import format_bytes
from edgedec.storage.file_lock import FileLock, try_lock
from edgedec_runtimes.cpu.tiles.build import (
    CacheUnusableError,
    Fill,
    Job,
    cache_errors,
    make_file,
    make_in_memory,
    require_unchanged,
)
from edgedec_runtimes.cpu.tiles.file import TileHead, Tiles, TileTensor, map_tiles
from edgedec_runtimes.cpu.tiles.listing import remove_missing, remove_outdated, tile_paths, tiles_folder
from edgedec_runtimes.cpu.tiles.placing import copy_to_memory, in_huge_pages
from edgedec_runtimes.cpu.tiles.sources import (
    Source,
    Stamp,
    add_source,
    model_sha256,
    read_sources,
    read_stamp,
    sources_path,
    write_sources,
)

__all__ = ["Fill", "Job", "TileTensor", "Tiles", "can_be_mapped", "known_tile_file", "open_tiles"]

MARGIN_BYTES = 16 << 20  # stays free on the disk
POLL_S = 0.1

logger = logging.getLogger("edgedec.tiles")


def open_tiles(job: Job) -> Tiles:
    """Return the tiles that a job wants; they are made first where no sound tile file of this very model is there.

    What they will take on the disk is said before they are written, in the log and in the detail of the first progress.
    After a failure of the disk, `job.fill` is called again from the first tensor on, for private memory.

    Raises:
        CancelledError: The job was cancelled.
        ModelNotFoundError, StorageError: The model's files are gone, can't be read or change while they are read; or
            private memory would be left, and will not do.
        MemoryCapError: The system has no memory for the tiles.
    """
    if job.cache_dir is not None:
        try:
            return _from_cache(job, job.cache_dir)
        except CacheUnusableError as error:
            if not job.in_memory:
                raise
            logger.warning("%s: the tiles are made in memory, at each start: %s", job.label, error)
    return make_in_memory(job)


def known_tile_file(job: Job) -> Path | None:
    """Return a sound tile file that may be this model's, as the header is the same; None where there is none."""
    if job.cache_dir is None:
        return None
    try:
        found = _candidates(job, tiles_folder(job.cache_dir))
    except CacheUnusableError:
        return None
    for tiles in found:
        tiles.close()
    return found[0].path if found else None


def can_be_mapped(job: Job) -> bool:
    """Tell whether open_tiles will map a file: a tile file is there, or the disk has room for one and takes it."""
    if job.cache_dir is None:
        return False
    if known_tile_file(job) is not None:
        return True
    folder = tiles_folder(job.cache_dir)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        room = shutil.disk_usage(folder).free >= job.n_bytes + MARGIN_BYTES
        return room and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _key(head: TileHead) -> str:
    wanted = json.dumps([head.layout, head.header_hash, head.n_model_bytes])
    return hashlib.sha256(wanted.encode()).hexdigest()[:16]


def _from_cache(job: Job, cache_dir: Path) -> Tiles:
    folder = tiles_folder(cache_dir)
    try:
        source = file_states(job.gguf.paths)
    except OSError as error:
        raise ModelNotFoundError(f"{job.gguf.paths[0]}: {error.strerror or error}; check the directory") from error
    tiles = _find(job, folder, source)
    if tiles is None:
        with _locked(job, folder):
            tiles = _find(job, folder, source, discard=True) or _build(job, cache_dir, source)
    return tiles


def _find(job: Job, folder: Path, source: Source, *, discard: bool = False) -> Tiles | None:
    """Return the tiles of this very model; None where there are no sound ones. With `discard`, delete damaged files.

    Where a tile file was made from other paths or times, the model is read to find out whether it is the same.
    """
    found = _candidates(job, folder, discard=discard)
    chosen = next((tiles for tiles in found if tiles.path and source in read_sources(tiles.path)), None)
    try:
        if found and chosen is None:
            chosen = _equal_model(job, found, source)
    finally:
        for tiles in found:
            if tiles is not chosen:
                tiles.close()
    try:
        return None if chosen is None else _opened(job, chosen)
    except ModelFormatError as error:
        if discard and chosen is not None and chosen.path is not None:
            _discard(chosen.path, error)
    return None


def _opened(job: Job, tiles: Tiles) -> Tiles:
    """Return mapped tiles as the job wants them, mapped or copied (ModelFormatError where they are damaged)."""
    assert tiles.path is not None, "they are in a file"
    with ExitStack() as undo:
        undo.enter_context(tiles)
        if job.mapped:
            _require_sound(job, tiles)
            opened = in_huge_pages(job, tiles)
        else:
            opened = copy_to_memory(job, tiles)
        if opened is tiles:
            undo.pop_all()
    with suppress(OSError):  # in a folder that is read-only the time of the last use stays unknown
        os.utime(sources_path(tiles.path))
    return opened


def _require_sound(job: Job, tiles: Tiles) -> None:
    """Read mapped tiles whose file may have been written to since it was found to be sound (raises as Tiles.verify)."""
    assert tiles.path is not None, "they are in a file"
    assert tiles.file is not None, "it is open"
    now = os.fstat(tiles.file.fileno())
    stamp = Stamp(now.st_size, now.st_mtime_ns)
    if read_stamp(tiles.path) == stamp:
        return
    logger.info("%s: its tiles may have changed since they were made; they are read to see whether they did", job.label)
    tiles.verify(on_progress=job.on_progress, cancel=job.cancel)
    try:
        write_sources(tiles.path, read_sources(tiles.path), stamp)
    except OSError as error:
        logger.info("%s: that its tiles are sound can't be written down (%s); each start reads them", job.label, error)


def _discard(path: Path, error: ModelFormatError) -> None:
    logger.warning("%s", error)
    with cache_errors():
        path.unlink(missing_ok=True)


def _candidates(job: Job, folder: Path, *, discard: bool = False) -> list[Tiles]:
    """Return the tiles, mapped, of all files for this header, size, layout and tensors; `discard` as for _find."""
    found, start = [], _key(job.head) + "."
    with cache_errors():
        for path in tile_paths(folder):
            if not path.name.startswith(start):
                continue
            try:
                tiles = map_tiles(path, job.label)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except ModelFormatError as error:
                if discard:
                    _discard(path, error)
                continue
            if replace(tiles.head, model_sha256=job.head.model_sha256, crcs=job.head.crcs) == job.head:
                found.append(tiles)
            else:
                logger.info("%s: its tiles are other ones than expected; they are made anew", job.label)
                tiles.close()
    return found


def _equal_model(job: Job, found: list[Tiles], source: Source) -> Tiles | None:
    """Read the model and return those tiles that were made from the same bytes; None where there are none."""
    if not job.sha256:
        logger.info("%s is not known by its path and times; it is read to see whether it changed", job.label)
        n_bytes = job.gguf.n_bytes
        sha256 = model_sha256(job.gguf.paths, lambda done: job.report("verify", done, n_bytes, job.label))
        require_unchanged(job, source)
        job.sha256 = sha256
    chosen = next((tiles for tiles in found if tiles.head.model_sha256 == job.sha256), None)
    if chosen is not None and chosen.path is not None:
        _remember(job, chosen.path, source)
    return chosen


def _remember(job: Job, path: Path, source: Source, stamp: Stamp | None = None) -> None:
    try:
        add_source(path, source, stamp)
    except OSError as error:
        logger.info("%s: what its tiles were made from can't be written (%s); each start reads it", job.label, error)


def _build(job: Job, cache_dir: Path, source: Source) -> Tiles:
    """Make the tile file while the lock is held, and return its tiles.

    Delete the tiles of models that were at the same paths before, and of models that are gone.
    """
    folder = tiles_folder(cache_dir)
    logger.info("%s: tiles: %s on disk in %s", job.label, format_bytes(job.n_bytes), folder)
    with cache_errors():
        free = shutil.disk_usage(folder).free
    if free < job.n_bytes + MARGIN_BYTES:
        raise CacheUnusableError(
            f"{format_bytes(job.n_bytes)} for tiles are needed in {folder}, {format_bytes(free)} are free; "
            "make room, or name another folder (EDGEDEC_CACHE)"
        )
    path = make_file(job, _partial_path(job, folder), source)
    with cache_errors():
        found = path.stat()
        _remember(job, path, source, Stamp(found.st_size, found.st_mtime_ns))
    _announce(
        "%s: %s kept in %s, so that its next start is fast (edgedec cache prune --all deletes it)",
        job.label,
        format_bytes(job.n_bytes),
        folder,
    )
    try:
        remove_outdated(cache_dir, source)
        if n_bytes := remove_missing(cache_dir):
            _announce("%s of tiles deleted, whose models are gone", format_bytes(n_bytes))
    except StorageError as error:
        logger.info("%s", error)
    with cache_errors():
        return _opened(job, map_tiles(path, job.label))


def _announce(message: str, *values: object) -> None:
    """Log a message that a person should see although nothing is wrong; the command line prints it."""
    logger.info(message, *values, extra={"tell": True})


def _partial_path(job: Job, folder: Path) -> Path:
    return folder / f"{_key(job.head)}.partial"


@contextmanager
def _locked(job: Job, folder: Path) -> Iterator[None]:
    """Hold the lock of the tile file; while another process holds it, wait and report how far that process is."""
    partial = _partial_path(job, folder)
    done = 0
    while (lock := _try_lock(partial)) is None:
        with suppress(OSError):  # the other process has not begun, or has just finished
            done = partial.stat().st_size
        job.report("wait", done, job.n_bytes, f"tiles of {job.label}, made by another process")
        time.sleep(POLL_S)
    with lock:
        yield


def _try_lock(partial: Path) -> FileLock | None:
    with cache_errors():
        partial.parent.mkdir(parents=True, exist_ok=True)
        return try_lock(partial.with_suffix(""))
