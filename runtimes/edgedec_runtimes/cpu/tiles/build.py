"""Making the tiles of a model, in a file that appears whole or not at all, or in private memory.

The file is written in aligned pieces of 2 MiB, so that the system's cache can hold it in huge pages from the start.
"""

import errno
import mmap
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

import numpy as np

from edgedec.errors import MemoryCapError, StorageError
from edgedec.gguf.file import GGUF, file_states
from edgedec.gguf.tile_header import TileHeader, TileTensor
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec.storage.whole_file import publish
from edgedec_runtimes.cpu.tiles.file import U8, Tiles, blocks
from edgedec_runtimes.cpu.tiles.huge_pages import ask_for
from edgedec_runtimes.cpu.tiles.sources import Source, model_sha256
from edgedec_runtimes.shared import pages

Fill = Callable[[str, U8, int], None]

_POLL_S = 0.1
_PIECE_BYTES = 8 << 20
_ALIGNED_BYTES = 2 << 20


class CacheUnusableError(StorageError):
    """The disk does not take the tiles, which are made in private memory instead."""


@dataclass
class Job:
    """Which tiles of a model to make or open, where they are kept, and how progress is reported.

    Attributes:
        gguf: The model, unchanged since its header was read.
        tensors: Names and sizes of the tiles, in the order of the file; no name twice.
        plain: What a tile file also holds, behind the tiles, so that it can take the place of the GGUF; none where it
            can't.
        layout: Version of the arrangement; each version has a tile file of its own.
        fill: Writes one tensor's tiles: called with its name, zeros (uint8) to write into, and the byte of the tiles
            that these begin with. The tiles of a tensor that has units may be made some units at a time, in order.
        cache_dir: The cache's root; None for private memory.
        tiles_only: Whether a tile file may take the place of the model's file.
        in_memory: Whether private memory will do where the disk does not take the tiles.
        mapped: Whether a tile file is mapped; else its contents are copied to private memory and checked.
        huge_pages: "auto", "on" or "off", as in LoadOptions.
        rows_only: Names of the tensors whose rows a forward reads from the tile file, where there is one.
        on_progress: Gets the phases "tiles", "wait" (another process makes the tiles), "verify" (a model or a tile file
            that may have changed is read) and "load" (tiles are copied).
        cancel: Stops the work between two tensors at the latest; nothing is left on the disk.
        header: The header of the tile file but for what is known when the tiles are made: SHA-256 and CRCs.
        n_bytes: What the tiles take, header and padding included.
        sha256: Of the model's files, once it is known; "" before.
    """

    gguf: GGUF
    tensors: Sequence[TileTensor]
    layout: str
    fill: Fill
    cache_dir: Path | None = None
    tiles_only: bool = False
    in_memory: bool = True
    mapped: bool = True
    huge_pages: str = "off"
    rows_only: frozenset[str] = frozenset()
    on_progress: OnProgress | None = None
    cancel: CancelToken | None = None
    header: TileHeader = field(init=False)
    n_bytes: int = field(init=False)
    sha256: str = ""
    plain: Sequence[TileTensor] = ()

    def __post_init__(self) -> None:
        tensors = (*self.tensors, *self.plain)
        assert len({tensor.name for tensor in tensors}) == len(tensors), "a tensor is there twice"
        unknown = "0" * 64, tensors, (0,) * len(tensors), len(self.plain)
        self.header = TileHeader(self.layout, self.gguf.header_hash, self.gguf.n_bytes, *unknown)
        self.n_bytes = self.header.matrices_end
        if self.gguf.form is not None:
            self.sha256 = self.gguf.form.tiles.model_sha256

    @property
    def n_file_bytes(self) -> int:
        """What a tile file takes on the disk."""
        return self.header.offsets()[-1]

    @property
    def label(self) -> str:
        """The name of the model's first file."""
        return self.gguf.paths[0].name

    def report(self, phase: str, done: int, total: int, detail: str) -> None:
        """Report progress in bytes (CancelledError where the work is cancelled)."""
        check_cancelled(self.cancel, f"{phase} {self.label}")
        report_progress(self.on_progress, phase, done, total, "bytes", detail)


@contextmanager
def cache_errors() -> Iterator[None]:
    """Raise CacheUnusableError for an OSError of the block."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))
        remedy = "make room there" if full else "make the folder writable"
        raise CacheUnusableError(
            f"the cache can't be used: {error}; {remedy}, or name another folder (EDGEDEC_CACHE)"
        ) from error


def make_in_memory(job: Job) -> Tiles:
    """Return tiles made in private memory, at the offsets that they would have in a file.

    Raises:
        CancelledError: The job was cancelled.
        MemoryCapError: The system has no memory for the tiles.
    """
    buffer = private_memory(job.n_bytes, huge=job.huge_pages != "off")
    whole: U8 = np.frombuffer(buffer, np.uint8)
    detail, total = f"{job.label}, in memory", job.n_bytes
    job.report("tiles", 0, total, detail)
    for tensor, offset in zip(job.tensors, job.header.offsets(), strict=False):
        job.fill(tensor.name, whole[offset : offset + tensor.n_bytes], 0)
        job.report("tiles", offset + tensor.n_bytes, total, detail)
    return Tiles(buffer, job.header, job.label)


def make_file(job: Job, partial_path: Path, source: Source) -> Path:
    """Make the tile file and return its path: the stem of `partial_path`, the model's SHA-256 and `.tiles`.

    The file is written as `partial_path`, whose lock the caller holds. Nothing stays there, whatever is raised.

    Raises:
        CacheUnusableError: The disk does not take the file.
        StorageError: The model changed while it was read.
        CancelledError: The job was cancelled.
        MemoryCapError: The system has no memory for a piece of the tiles.
    """
    detail = f"{job.label}, kept in {partial_path.parent}"
    with PartialFile(partial_path) as partial:
        with _background_sha256(job, detail) as sha256:
            crcs = _write_tiles(job, partial, detail)
            job.sha256 = sha256()
        require_unchanged(job, source)
        path = partial_path.with_suffix(f".{job.sha256[:16]}.tiles")
        partial.publish(replace(job.header, model_sha256=job.sha256, crcs=crcs), path)
    return path


def require_unchanged(job: Job, source: Source) -> None:
    """Raise StorageError unless the model's files are in the states of `source`."""
    try:
        unchanged = file_states(job.gguf.paths) == source
    except OSError:
        unchanged = False
    if not unchanged:
        raise StorageError(f"{job.gguf.paths[0]} changed while it was read; load it again when it is complete")


def _write_tiles(job: Job, partial: "PartialFile", detail: str) -> tuple[int, ...]:
    """Make and write the tiles tensor by tensor, those of large tensors in pieces, and return the CRC of each tensor.

    The tiles pass through a buffer. Written through a mapping instead, a full disk would end the process.
    """
    crcs, done, total = [], 0, job.n_file_bytes
    buffer = private_memory(max((_piece_bytes(tensor) for tensor in job.header.tensors), default=0))
    scratch: U8 = np.frombuffer(buffer, np.uint8)
    for tensor, offset in zip(job.header.tensors, job.header.offsets(), strict=False):
        job.report("tiles", done, total, detail)
        partial.seek(offset)
        crc, done, step = 0, offset, _piece_bytes(tensor)
        for start in range(0, max(1, tensor.n_bytes), max(1, step)):
            out = scratch[: min(step, tensor.n_bytes - start)]
            out[:] = 0
            job.fill(tensor.name, out, start)
            for block in blocks(out):
                crc = zlib.crc32(block, crc)
                partial.write(block)
                done += len(block)
                job.report("tiles", done, total, detail)
        crcs.append(crc)
    return tuple(crcs)


def _piece_bytes(tensor: TileTensor) -> int:
    """Return how many bytes of a tensor's tiles are made at once."""
    if tensor.unit_bytes == 0:
        return tensor.n_bytes
    return min(tensor.n_bytes, max(1, _PIECE_BYTES // tensor.unit_bytes) * tensor.unit_bytes)


class PartialFile:
    """The file that becomes the tile file. Leaving its context deletes it, unless it was published.

    It is written in aligned pieces: what does not fill a piece waits in memory for the next write.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting = bytearray()
        self._end = 0  # of what was written, and waits

    def __enter__(self) -> Self:
        with cache_errors():
            self._file = open(self._path, "wb", buffering=0)
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # write or publish raised an error for what could not be written
            self._file.close()
        with suppress(OSError):  # it was published
            self._path.unlink()

    def seek(self, offset: int) -> None:
        """Continue at a byte of the file; a gap of less than a piece is filled with zeros."""
        gap = offset - self._end
        if 0 <= gap < _ALIGNED_BYTES:
            self.write(bytes(gap))
            return
        self.flush()
        with cache_errors():
            self._file.seek(offset)
        self._end = offset

    def write(self, data: bytes | memoryview) -> None:
        n_first = -self._end % _ALIGNED_BYTES  # bytes that complete the piece that is begun
        self._end += len(data)
        n_late = self._end % _ALIGNED_BYTES  # bytes of the last piece, which is not complete
        if n_late > len(data):
            self._waiting += data
            return
        now, late = memoryview(data)[: len(data) - n_late], data[len(data) - n_late :]
        if self._waiting:
            self._waiting, now = self._waiting + now[:n_first], now[n_first:]
            self.flush()
        self._write(now)
        self._waiting += late

    def flush(self) -> None:
        """Write what waits for the rest of its piece."""
        waiting, self._waiting = self._waiting, bytearray()
        self._write(memoryview(waiting))

    def _write(self, rest: memoryview) -> None:
        with cache_errors():
            while rest:
                rest = rest[self._file.write(rest) :]

    def publish(self, header: TileHeader, path: Path) -> None:
        """Write the header, wait until the disk holds the whole file, and give the file its final name."""
        self.flush()
        self.seek(0)
        self.write(header.encode())
        self.flush()
        with cache_errors():
            self._file.truncate(header.offsets()[-1])
            os.fsync(self._file.fileno())
            self._file.close()
            publish(self._path, path)


@contextmanager
def _background_sha256(job: Job, detail: str) -> Iterator[Callable[[], str]]:
    """Compute the model's SHA-256 in another thread while the block runs.

    Yield a function that waits for the SHA-256 and returns it. Leaving the block earlier stops the computation.
    """
    stop = CancelToken()

    def work() -> str:
        return job.sha256 or model_sha256(job.gguf.paths, lambda _: stop.check("hash"))

    def wait() -> str:
        while not future.done():
            job.report("tiles", job.n_file_bytes, job.n_file_bytes, detail)
            with suppress(TimeoutError):
                return future.result(_POLL_S)
        return future.result()

    with ThreadPoolExecutor(1, "edgedec-sha256") as pool:
        future: Future[str] = pool.submit(work)
        try:
            yield wait
        finally:
            stop.cancel()


def private_memory(n_bytes: int, *, huge: bool = False) -> mmap.mmap:
    """Return private memory of zeros that begins with a page; `huge` asks the system for huge pages.

    Raises:
        MemoryCapError: The system refuses the memory.
    """
    try:
        memory = pages.private_memory(max(1, n_bytes))
    except (OSError, MemoryError) as error:
        raise MemoryCapError(
            f"the system has no {format_bytes(n_bytes)} for the tiles; close programs, or use a smaller model"
        ) from error
    if huge:
        ask_for(memory)
    return memory
