"""A fetched model takes room on the disk once: its tiles take the place of its GGUF, which is made again on demand.

    models/NAME.gguf                 the GGUF, whose record is NAME.gguf.json
    models/tiles/NAME.tiles          the tile file in its place
    models/NAME.gguf.whole.partial   the GGUF while it is made again

Each change is one renaming, after the new file was read back and found to stand for the bytes that were fetched, by
their SHA-256. A process that is killed leaves the file that was there, or the new one; tiles that are called NAME.gguf
then, as earlier versions called them, get their name later.
"""

import hashlib
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from edgedec.errors import ModelError, StorageError, as_storage_error
from edgedec.gguf.file import GGUF, read_gguf
from edgedec.gguf.places import standing, tiled_place
from edgedec.gguf.tile_form import damaged_model
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.storage.whole_file import publish
from edgedec_runtimes.shared.file_lock import FileLock, try_lock
from edgedec_runtimes.tile_files.record import FileRecord, is_tiled, move_tiles, read_record, write_record_of

_MARGIN_BYTES = 16 << 20  # stays free on the disk
_PIECE_BYTES = 1 << 20
_POLL_S = 0.1

logger = logging.getLogger("edgedec.tiles")


def whole_pieces(gguf: GGUF) -> Iterator[bytes]:
    """Yield the bytes of a GGUF that a tile file took the place of, in order.

    Raises:
        ModelFormatError, StorageError, ModelNotFoundError: As GGUF.read_tensor_bytes.
    """
    yield gguf.read_header_bytes()
    end = gguf.n_header_bytes
    for tensor in sorted(gguf.tensors.values(), key=lambda tensor: tensor.offset):
        yield bytes(tensor.offset - end)
        for start in range(0, tensor.n_bytes, _PIECE_BYTES):
            yield gguf.read_tensor_bytes(tensor.name, start, min(_PIECE_BYTES, tensor.n_bytes - start))
        end = tensor.offset + tensor.n_bytes
    yield bytes(gguf.n_bytes - end)


def whole_sha256(gguf: GGUF, take: Callable[[bytes, int], object] = lambda piece, done: None) -> str:
    """Return the SHA-256 (hex) of the GGUF that a tile file took the place of.

    Args:
        gguf: The model.
        take: Called with each piece of the GGUF and the number of bytes up to its end.

    Raises:
        ModelFormatError, StorageError, ModelNotFoundError: As GGUF.read_tensor_bytes.
    """
    digest, done = hashlib.sha256(), 0
    for piece in whole_pieces(gguf):
        digest.update(piece)
        done += len(piece)
        take(piece, done)
    return digest.hexdigest()


def keep_as_tiles(
    tile_path: Path, path: Path, *, on_progress: OnProgress | None = None, cancel: CancelToken | None = None
) -> bool:
    """Let a tile file take the place of a fetched model's GGUF; return whether it did.

    It does where the model has a record that does not forbid it, the GGUF is still the one that was fetched, and the
    GGUF's bytes can be made again from the tile file. Processes that have one of the files open keep it.

    Args:
        tile_path: The tile file, which is gone from there afterwards; the caller holds its lock.
        path: The GGUF.
        on_progress: Gets the phase "verify".
        cancel: Stops the work; both files stay.

    Raises:
        CancelledError: The work was cancelled.
    """
    record = read_record(path)
    with ExitStack() as held:
        try:
            lock = try_lock(path)
            if lock is None:  # the model is being fetched, removed or made again
                return False
            held.enter_context(lock)
            if record is None or record.keep_file or not _is_fetched(path, record):
                return False
            if tile_path.stat().st_dev != path.parent.stat().st_dev:  # nothing can be renamed from there
                return False
            tiled = read_gguf(tile_path)
            report = _reporter(path.name, "verify", tiled.n_bytes, on_progress, cancel)
            if whole_sha256(tiled, lambda _, done: report(done)) != record.sha256:
                logger.info("%s: its bytes can't be made again from its tiles; both are kept", path.name)
                write_record_of(path, replace(record, keep_file=True))
                return False
            write_record_of(path, replace(record, tiles_mtime_ns=tile_path.stat().st_mtime_ns))
            publish(tile_path, path)
            with suppress(OSError):  # a later start renames it
                move_tiles(path)
        except (OSError, ModelError, StorageError) as error:
            logger.info("%s: its file is kept beside its tiles: %s", path.name, error)
            return False
    return True


def make_whole(
    path: Path, *, keep: bool = False, on_progress: OnProgress | None = None, cancel: CancelToken | None = None
) -> bool:
    """Make a model's GGUF again where a tile file took its place; return whether that was so.

    Args:
        path: The model's file.
        keep: Note in the model's record that no tile file may take the GGUF's place later.
        on_progress: Gets the phases "wait" and "restore".
        cancel: Stops the work; the tile file stays.

    Raises:
        ModelFormatError: The tile file is damaged; it stays.
        StorageError: The disk has no room for the GGUF, or fails.
        CancelledError: The work was cancelled.
    """
    if keep:
        _note(path, keep_file=True)
    if not is_tiled(path):
        return False
    with _locked(path, on_progress, cancel):
        gguf = read_gguf(path)
        if gguf.form is None:  # another process has made it
            return False
        with _storage_errors(path):
            _restore(gguf, path, _reporter(path.name, "restore", gguf.n_bytes, on_progress, cancel))
            tiled_place(path).unlink(missing_ok=True)
    return True


def let_tiles_replace(path: Path) -> None:
    """Allow again that a tile file takes the place of a model's GGUF, after make_whole has forbidden it.

    Raises:
        StorageError: The model's record can't be written.
    """
    _note(path, keep_file=False)


def _note(path: Path, *, keep_file: bool) -> None:
    record = read_record(path)
    if record is not None and record.keep_file != keep_file:
        with _storage_errors(path):
            write_record_of(path, replace(record, keep_file=keep_file))


@contextmanager
def header_file(gguf: GGUF) -> Iterator[Path]:
    """Yield a file with the header of a tiled model and the size of its GGUF, and nothing else; for dry runs.

    Raises:
        StorageError: It can't be written.
    """
    with tempfile.TemporaryDirectory(prefix="edgedec-") as folder:
        path = Path(folder, gguf.paths[0].name)
        with _storage_errors(path):
            write_header_file(path, gguf.read_header_bytes(), gguf.n_bytes)
        yield path


def write_header_file(path: Path, header: bytes | memoryview, n_bytes: int) -> None:
    """Write a file of `n_bytes` of which only the header takes room on the disk (OSError where it can't be written)."""
    with path.open("wb") as file:
        file.write(header)
        file.truncate(n_bytes)


def _restore(gguf: GGUF, path: Path, report: Callable[[int], None]) -> None:
    assert gguf.form is not None, "a tile file took its place"
    tiles = gguf.form.tiles
    free = shutil.disk_usage(path.parent).free
    if free < gguf.n_bytes + _MARGIN_BYTES:
        raise StorageError(
            f"{path.name} is kept as tiles, and to make its file again {format_bytes(gguf.n_bytes)} more are needed in "
            f"{path.parent}, where {format_bytes(free)} are free; make room"
        )
    partial = path.with_name(f"{path.name}.whole.partial")
    try:
        with partial.open("wb") as file:

            def write(piece: bytes, done: int) -> None:
                file.write(piece)
                report(done)

            sha256 = whole_sha256(gguf, write)
            if sha256 != tiles.model_sha256:
                raise damaged_model(path, f"it stands for the SHA-256 {sha256}, expected {tiles.model_sha256}")
            file.flush()
            os.fsync(file.fileno())
        if (record := read_record(path)) is not None and record.sha256 == sha256:
            os.utime(partial, ns=(record.mtime_ns, record.mtime_ns))
        publish(partial, path)
    finally:
        with suppress(OSError):  # it was published, or nothing can be deleted
            partial.unlink()
    logger.info("%s: the file was made again from its tiles", path.name)


def _is_fetched(path: Path, record: FileRecord) -> bool:
    """Tell whether what is at a path still is the file that was fetched, or tiles that took its place."""
    status = standing(path).stat()
    if (status.st_size, status.st_mtime_ns) == (record.size_bytes, record.mtime_ns):
        return True
    form = read_gguf(path).form if is_tiled(path) else None
    return form is not None and form.tiles.model_sha256 == record.sha256


def _reporter(
    label: str, phase: str, total: int, on_progress: OnProgress | None, cancel: CancelToken | None
) -> Callable[[int], None]:
    def report(done: int) -> None:
        check_cancelled(cancel, f"{phase} {label}")
        report_progress(on_progress, phase, done, total, "bytes", label)

    return report


@contextmanager
def _locked(path: Path, on_progress: OnProgress | None, cancel: CancelToken | None) -> Iterator[None]:
    """Hold the lock of a model's file; while another process holds it, wait."""
    lock: FileLock | None = None
    report = _reporter(f"another process that has {path.name}", "wait", 0, on_progress, cancel)
    while lock is None:
        with _storage_errors(path):
            lock = try_lock(path)
        if lock is None:
            report(0)
            time.sleep(_POLL_S)
    with lock:
        yield


def _storage_errors(path: Path) -> AbstractContextManager[None]:
    return as_storage_error(str(path), "its folder must have room, and let you write")
