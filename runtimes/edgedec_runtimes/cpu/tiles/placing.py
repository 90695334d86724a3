"""Where the tiles of a file lie in memory: in the mapped file, or copied to private memory."""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import numpy as np

from edgedec.gguf.tile_header import TileHeader
from edgedec.memory_plan import format_bytes
from edgedec_runtimes.cpu.tiles import huge_pages
from edgedec_runtimes.cpu.tiles.build import Job, private_memory
from edgedec_runtimes.cpu.tiles.file import MAPPED_HUGE, PRIVATE_HUGE, U8, Tiles, read_into, read_tiles
from edgedec_runtimes.shared.pages import forget

_PAGE_BYTES = 1 << 16  # a multiple of every size of a page
_LEAST_BYTES = 16 << 20  # of weights for which huge pages are worth a copy
_BLOCK_BYTES = 1 << 24

logger = logging.getLogger("edgedec.tiles")


def copy_to_memory(job: Job, tiles: Tiles) -> Tiles:
    """Return a checked copy in private memory of mapped tiles, read from their file.

    Raises:
        ModelFormatError: The tiles are damaged.
        CancelledError: The job was cancelled.
        MemoryCapError: The system has no memory for the copy.
    """
    assert tiles.file is not None, "they are mapped"
    buffer, places = private_memory(tiles.n_bytes, huge=job.huge_pages != "off"), tiles.header.places()
    whole: U8 = np.frombuffer(buffer, np.uint8)

    def place(name: str, start: int, n_bytes: int) -> U8:
        begin = places[name] + start
        return whole[begin : begin + n_bytes]

    read_tiles(
        tiles.file,
        tiles.header,
        job.label,
        place,
        n_tensors=tiles.header.n_matrices,
        phase="load",
        on_progress=job.on_progress,
        cancel=job.cancel,
    )
    return Tiles(buffer, tiles.header, job.label)


def in_huge_pages(job: Job, tiles: Tiles) -> Tiles:
    """Return mapped tiles as the job wants their pages: the same tiles, or a copy in huge pages of private memory.

    A copy is not compared with the checksums, as a mapped file isn't either. It leaves out the tensors of which single
    rows are read from the file.

    Raises:
        ModelFormatError: A copy was to be made, and the file can't be read.
        CancelledError: The job was cancelled.
        MemoryCapError: The system has no memory for the copy.
    """
    assert tiles.file is not None, "they are mapped"
    spans = list(_spans(job, tiles.header))
    n_bytes = sum(n for _, n in spans)
    if job.huge_pages == "off":
        return tiles
    if job.huge_pages == "auto" or n_bytes < _LEAST_BYTES:
        huge_pages.ask_for(tiles.memory, spans)
        return tiles
    began, fd = perf_counter(), tiles.file.fileno()

    def report(done: int) -> None:
        job.report("load", done, n_bytes, f"{job.label}, in huge pages")

    if huge_pages.read_in_huge_pages(tiles.memory, fd, spans, report):
        tiles.held_as = MAPPED_HUGE
        return tiles
    reason = huge_pages.no_private_ones(n_bytes)
    if reason:
        _tell("%s: its weights stay out of huge pages: %s", job.label, reason)
        return tiles
    copy = _copy(job, tiles)
    _tell(
        "%s: %s of weights were copied to huge pages in %.1f s; no other process shares this memory",
        job.label,
        format_bytes(n_bytes),
        perf_counter() - began,
    )
    return copy


def planned_pages(job: Job, rows_only_bytes: int, path: Path | None) -> str:
    """Return what a memory plan says of the pages of mapped tiles.

    Args:
        job: The tiles.
        rows_only_bytes: The bytes of the tensors of which single rows are read from the file.
        path: The file of the tiles, or of the model where there are no tiles yet; copying it is timed.

    Raises:
        StorageError: The file can't be read.
    """
    n_bytes = job.n_bytes - rows_only_bytes
    if job.huge_pages != "on" or n_bytes < _LEAST_BYTES or path is None:
        return "mapped"
    reason = huge_pages.no_private_ones(n_bytes)
    if reason:
        return f"mapped; not copied to huge pages: {reason}"
    seconds = huge_pages.copying_seconds(path, n_bytes)
    return (
        f"mapped in huge pages, or where the file can't be: {format_bytes(n_bytes)} copied at each start "
        f"({seconds:.2g} s), which no other process shares"
    )


def _copy(job: Job, tiles: Tiles) -> Tiles:
    """Return a copy of mapped tiles in huge pages, and have the system's cache drop what was copied."""
    assert tiles.file is not None, "they are mapped"
    fd = tiles.file.fileno()
    buffer = private_memory(tiles.n_bytes, huge=True)
    whole: U8 = np.frombuffer(buffer, np.uint8)
    spans = list(_spans(job, tiles.header))
    done, total = 0, sum(n for _, n in spans)
    for start, n_bytes in spans:
        for begin in range(start, start + n_bytes, _BLOCK_BYTES):
            end = min(begin + _BLOCK_BYTES, start + n_bytes, tiles.n_bytes)
            read_into(tiles.file, begin, whole[begin:end], job.label)
            forget(fd, 0, end)
            done += end - begin
            job.report("load", done, total, f"{job.label}, to huge pages")
    forget(fd)
    file = os.fdopen(os.dup(fd), "rb")
    copy = Tiles(buffer, tiles.header, job.label, tiles.path, file)
    copy.held_as = PRIVATE_HUGE
    return copy


def _spans(job: Job, header: TileHeader) -> Iterator[huge_pages.Span]:
    """Yield the parts of the file, in whole pages, that hold all tensors but those whose rows are read."""
    begins, end = header.offsets()[: header.n_matrices], header.matrices_end
    if not begins:
        return
    skipped = [i for i, tensor in enumerate(job.tensors) if tensor.name in job.rows_only]
    firsts = [begins[0], *(begins[i] + header.tensors[i].n_bytes for i in skipped)]
    for first, last in zip(firsts, [*(begins[i] for i in skipped), end], strict=True):
        start = first // _PAGE_BYTES * _PAGE_BYTES
        if last > first:
            yield start, last - start


def _tell(message: str, *values: object) -> None:
    """Log a message that the command line prints."""
    logger.info(message, *values, extra={"tell": True})
