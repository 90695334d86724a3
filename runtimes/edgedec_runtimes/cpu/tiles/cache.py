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

from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, StorageError
from edgedec.gguf.file import file_states, read_gguf, storage_error
from edgedec.gguf.places import standing
from edgedec.gguf.tile_form import damaged_model
from edgedec.gguf.tile_header import TileHeader, TileTensor
from edgedec.memory_plan import format_bytes
from edgedec_runtimes.cpu.tiles.build import (
    CacheUnusableError,
    Fill,
    Job,
    cache_errors,
    make_file,
    make_in_memory,
    require_unchanged,
)
from edgedec_runtimes.cpu.tiles.file import Tiles, map_tiles
from edgedec_runtimes.cpu.tiles.listing import remove_missing, remove_outdated, tile_paths, tiles_folder
from edgedec_runtimes.cpu.tiles.placing import copy_to_memory, in_huge_pages
from edgedec_runtimes.cpu.tiles.sources import (
    Source,
    Stamp,
    add_source,
    is_current,
    model_sha256,
    read_sources,
    read_stamp,
    sources_path,
    write_sources,
)
from edgedec_runtimes.shared.file_lock import FileLock, try_lock
from edgedec_runtimes.shared.pages import MAPPED_FILES_MOVE
from edgedec_runtimes.tile_files.keeping import keep_as_tiles
from edgedec_runtimes.tile_files.record import read_record, write_record_of

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
    if (tiles := _in_the_model(job)) is not None:
        return tiles
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
    if _is_in_the_model(job):
        return standing(job.gguf.paths[0])
    if job.cache_dir is None:
        return None
    try:
        candidates = _candidates(job, tiles_folder(job.cache_dir))
    except CacheUnusableError:
        return None
    for tiles in candidates:
        tiles.close()
    return candidates[0].path if candidates else None


def can_be_mapped(job: Job) -> bool:
    """Tell whether open_tiles will map a file: a tile file is there, or the disk has room for one and takes it."""
    if known_tile_file(job) is not None:
        return True
    if job.cache_dir is None:
        return False
    folder = tiles_folder(job.cache_dir)
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        room = shutil.disk_usage(folder).free >= job.n_file_bytes + MARGIN_BYTES
        return room and folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        return False


def _key(header: TileHeader) -> str:
    digest_text = json.dumps([header.layout, header.header_hash, header.n_model_bytes])
    return hashlib.sha256(digest_text.encode()).hexdigest()[:16]


def _from_cache(job: Job, cache_dir: Path) -> Tiles:
    folder = tiles_folder(cache_dir)
    tiles = _find(job, folder, _source(job))
    if tiles is None or _may_replace(job, cache_dir):
        with _locked(job, folder):  # under this lock the tiles may have taken the place of the GGUF meanwhile
            source, placed = _source(job), _in_the_model(job)
            if placed is not None and tiles is not None:
                tiles.close()
            tiles = placed or tiles or _find(job, folder, source, discard=True) or _build(job, cache_dir, source)
            if tiles.path is not None and placed is None and _may_replace(job, cache_dir):
                _replace_model(job, tiles, tiles.path)
    return tiles


def _may_replace(job: Job, cache_dir: Path) -> bool:
    """Tell whether the tile file may take the place of the model's file: one that was fetched to the cache."""
    path, models_folder = job.gguf.paths[0], os.environ.get("EDGEDEC_MODELS")
    if not job.tiles_only or not job.plain or not path.is_relative_to(cache_dir.absolute()) or path.is_symlink():
        return False
    if not MAPPED_FILES_MOVE:
        return False
    if (
        models_folder and Path(models_folder).expanduser().resolve() == path.parent.resolve()
    ):  # only the user writes there
        return False
    record = read_record(path)
    return record is not None and not record.keep_file


def _replace_model(job: Job, tiles: Tiles, tile_path: Path) -> None:
    """Let the tile file take the place of the model's file, where that works."""
    path = job.gguf.paths[0]
    if len([source for source in read_sources(tile_path) if is_current(source)]) > 1:
        return  # a copy of the model elsewhere uses the tiles, too
    with ExitStack() as undo:
        undo.enter_context(tiles)
        placed = keep_as_tiles(tile_path, path, on_progress=job.on_progress, cancel=job.cancel)
        undo.pop_all()
    if not placed:
        return
    tiles.path = standing(path)
    with suppress(OSError):
        sources_path(tile_path).unlink()
    _announce(
        "%s: kept as tiles alone, %s on the disk in %s; other programs can't read them, and edgedec pull --keep-file "
        "makes the GGUF again",
        job.label,
        format_bytes(job.n_file_bytes),
        tiles.path,
    )


def _source(job: Job) -> Source:
    try:
        return file_states(job.gguf.paths)
    except OSError as error:
        raise ModelNotFoundError(f"{job.gguf.paths[0]}: {error.strerror or error}; check the directory") from error


def _is_in_the_model(job: Job) -> bool:
    """Tell whether the model's file is a tile file, with the tiles that the job wants."""
    with suppress(EdgedecError):  # what is wrong with the file is said where it is read
        job.gguf = replace(read_gguf(job.gguf.paths[0]), tensors=job.gguf.tensors)
    if job.gguf.form is None:
        return False
    form_tiles = job.gguf.form.tiles
    job.sha256 = form_tiles.model_sha256
    return replace(form_tiles, model_sha256=job.header.model_sha256, crcs=job.header.crcs) == job.header


def _in_the_model(job: Job) -> Tiles | None:
    """Return the tiles of a model whose file is a tile file; None where it is not, or has another layout.

    Raises:
        ModelFormatError: They are damaged, and there is no GGUF to make others from.
    """
    if not _is_in_the_model(job):
        return None
    path = job.gguf.paths[0]
    with ExitStack() as undo:
        try:
            tiles = undo.enter_context(map_tiles(standing(path), job.label))
            _require_sound_model(job, path, tiles)
            opened = in_huge_pages(job, tiles) if job.mapped else copy_to_memory(job, tiles)
        except ModelFormatError as error:
            raise damaged_model(path, error) from error
        except OSError as error:
            raise storage_error(path, error) from error
        if opened is tiles:
            undo.pop_all()
    return opened


def _require_sound_model(job: Job, path: Path, tiles: Tiles) -> None:
    """Read the tile file of the model at `path` that will be mapped if it may have been written to since it was sound.

    Raises:
        ModelFormatError: The file is damaged.
        OSError: The file can't be looked at.
    """
    assert tiles.path is not None, "they are in a file"
    mtime_ns = tiles.path.stat().st_mtime_ns
    record = read_record(path)
    if job.mapped and (record is None or record.tiles_mtime_ns != mtime_ns):
        tiles.verify(on_progress=job.on_progress, cancel=job.cancel)
        if record is not None and record.sha256 == tiles.header.model_sha256:
            with suppress(OSError):  # a folder that is read-only: each start reads the tiles
                write_record_of(path, replace(record, tiles_mtime_ns=mtime_ns))


def _find(job: Job, folder: Path, source: Source, *, discard: bool = False) -> Tiles | None:
    """Return the tiles of this very model; None where there are no sound ones. With `discard`, delete damaged files.

    Where a tile file was made from other paths or times, the model is read to find out whether it is the same.
    """
    candidates = _candidates(job, folder, discard=discard)
    chosen = next((tiles for tiles in candidates if tiles.path and source in read_sources(tiles.path)), None)
    try:
        if candidates and chosen is None:
            chosen = _equal_model(job, candidates, source)
    finally:
        for tiles in candidates:
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
    candidates, start = [], _key(job.header) + "."
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
            if replace(tiles.header, model_sha256=job.header.model_sha256, crcs=job.header.crcs) == job.header:
                candidates.append(tiles)
            else:
                logger.info("%s: its tiles are other ones than expected; they are made anew", job.label)
                tiles.close()
    return candidates


def _equal_model(job: Job, candidates: list[Tiles], source: Source) -> Tiles | None:
    """Read the model and return those tiles that were made from the same bytes; None where there are none."""
    if not job.sha256:
        logger.info("%s is not known by its path and times; it is read to see whether it changed", job.label)
        n_bytes = job.gguf.n_bytes
        sha256 = model_sha256(job.gguf.paths, lambda done: job.report("verify", done, n_bytes, job.label))
        require_unchanged(job, source)
        job.sha256 = sha256
    chosen = next((tiles for tiles in candidates if tiles.header.model_sha256 == job.sha256), None)
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
    logger.info("%s: tiles: %s on disk in %s", job.label, format_bytes(job.n_file_bytes), folder)
    with cache_errors():
        free = shutil.disk_usage(folder).free
    if free < job.n_file_bytes + MARGIN_BYTES:
        raise CacheUnusableError(
            f"{format_bytes(job.n_file_bytes)} for tiles are needed in {folder}, {format_bytes(free)} are free; "
            "make room, or name another folder (EDGEDEC_CACHE)"
        )
    path = make_file(job, _partial_path(job, folder), source)
    with cache_errors():
        status = path.stat()
        _remember(job, path, source, Stamp(status.st_size, status.st_mtime_ns))
    if not _may_replace(job, cache_dir):
        _announce(
            "%s: %s kept in %s, so that its next start is fast (edgedec cache prune --all deletes it)",
            job.label,
            format_bytes(job.n_file_bytes),
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
    return folder / f"{_key(job.header)}.partial"


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
