"""A tile file in memory: its header (edgedec.gguf.tile_header) is checked before the file is mapped.

It is mapped from its first byte, so that any page size will do. Each start checks the header and the size of the file,
so it notices every cut and every change of the header. `Tiles.verify` reads all tiles and finds any change in them. A
forward fails where the file is cut short or changed while it is mapped (edgedec_runtimes.cpu.mapping).
"""

import mmap
import os
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from edgedec.closeable import Closeable
from edgedec.gguf.tile_header import TileHeader, checked_header, damaged
from edgedec.progress import CancelToken, OnProgress, check_cancelled, report_progress
from edgedec_runtimes.cpu.mapping import Mapping

_BLOCK_BYTES = 1 << 24

MAPPED, MAPPED_HUGE = "mapped", "mapped, in huge pages"
PRIVATE, PRIVATE_HUGE = "private", "private, in huge pages"

U8 = NDArray[np.uint8]


def map_tiles(path: Path, label: str = "") -> "Tiles":
    """Return the tiles of a file, mapped to be read only and shared with other processes.

    Raises:
        ModelFormatError: The file's header is refused, as by read_tile_header.
        OSError: The file can't be read or mapped.
    """
    label = label or path.name
    with ExitStack() as undo:
        file = undo.enter_context(path.open("rb"))
        header = checked_header(file, label)
        n_bytes = os.fstat(file.fileno()).st_size
        buffer = mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ)
        tiles = Tiles(buffer, header, label, path, file)
        undo.pop_all()
        return tiles


def read_tiles(
    file: BinaryIO,
    header: TileHeader,
    label: str,
    place: Callable[[str, int, int], U8],
    *,
    n_tensors: int | None = None,
    phase: str = "verify",
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> None:
    """Read all tiles of a file to memory and compare them with their CRCs.

    Args:
        header: The file's header.
        label: The model's name, for messages and progress.
        place: Called with a tensor's name, a byte of its tiles and a number of bytes; returns memory (uint8) for these.
        n_tensors: Read so many of them, the first ones; None for all.
        phase: The phase of the progress.
        on_progress: Called after each block.
        cancel: Stops the reading between two blocks.

    Raises:
        ModelFormatError: The tiles are damaged, or can't be read.
        CancelledError: `cancel` was cancelled.
    """
    tensors = header.tensors[:n_tensors]
    done, total = 0, sum(tensor.n_bytes for tensor in tensors)
    for tensor, offset, expected in zip(tensors, header.offsets(), header.crcs, strict=False):
        crc = 0
        for start in range(0, tensor.n_bytes, _BLOCK_BYTES):
            check_cancelled(cancel, f"{phase} {label}")
            out = place(tensor.name, start, min(_BLOCK_BYTES, tensor.n_bytes - start))
            read_into(file, offset + start, out, label)
            crc = zlib.crc32(out.data, crc)
            done += len(out)
            report_progress(on_progress, phase, done, total, "bytes", label)
        if crc != expected:
            raise damaged(label, f"of {tensor.name!r} they have the CRC-32 {crc:08x}, expected {expected:08x}")


def read_into(file: BinaryIO, offset: int, out: U8, label: str) -> None:
    """Fill `out` with the bytes of a tile file from `offset` on (ModelFormatError where they can't be read)."""
    rest = out.data
    try:
        file.seek(offset)
        while rest:
            n = file.readinto(rest)  # type: ignore[attr-defined]  # a binary file
            if not n:
                raise damaged(label, f"their file ends at {offset} bytes")
            offset, rest = offset + n, rest[n:]
    except OSError as error:
        raise damaged(label, f"reading them failed ({error.strerror or error})") from error


class Tiles(Closeable):
    """The tiles of a model by tensor name, in a mapped file or in private memory. Leaving its context closes them.

    A tile file that is deleted or replaced stays valid for the processes that have mapped it.

    Attributes:
        header: The header of the tile file, or the same for private memory.
        label: The model's name, for messages.
        path: The file of `file`; None without it.
        file: The tile file, open until close(); None where the tiles were made in memory or copied from it whole.
        mapping: Watches `file` and the memory; None without it.
        held_as: How memory holds the tiles: MAPPED, MAPPED_HUGE, PRIVATE or PRIVATE_HUGE, phrases for a person.
        n_bytes: What the tiles of matrices take, header and padding included.
        memory: The mapping or the private memory that holds the tiles at the header's offsets.
    """

    def __init__(
        self, buffer: mmap.mmap, header: TileHeader, label: str, path: Path | None = None, file: BinaryIO | None = None
    ) -> None:
        """Take over memory with the tiles at the header's offsets, and the file that is mapped there or copied."""
        self.header = header
        self.label = label
        self.path = path
        self.file = file
        self.mapping: Mapping | None = None
        self.held_as = PRIVATE if file is None else MAPPED
        self.n_bytes = min(len(buffer), header.matrices_end)
        self.memory = buffer
        whole: U8 = np.frombuffer(buffer, np.uint8)
        whole.flags.writeable = False
        if file is not None:
            self.mapping = Mapping(whole.ctypes.data, len(buffer), file.fileno())
        self._views = {
            tensor.name: whole[offset : offset + tensor.n_bytes]
            for tensor, offset in zip(header.tensors, header.offsets(), strict=False)
        }

    def __getitem__(self, name: str) -> U8:
        """Return a tensor's tiles, uint8[n_bytes]: read only, at a multiple of 64 bytes, valid until close."""
        return self._views[name]

    @property
    def mapped(self) -> bool:
        """Whether the memory is the pages of the file, which processes share."""
        return self.held_as in (MAPPED, MAPPED_HUGE)

    def verify(self, *, on_progress: OnProgress | None = None, cancel: CancelToken | None = None) -> None:
        """Read all tiles of a mapped file and compare them with the CRCs that were written when they were made.

        The file is read, and not the mapped memory, so that no page of it becomes resident.

        Raises:
            ModelFormatError: The tiles are damaged, or can't be read; the message names the first such tensor.
            CancelledError: `cancel` was cancelled.
        """
        if self.file is None:
            return
        block = np.empty(_BLOCK_BYTES, np.uint8)
        read_tiles(
            self.file, self.header, self.label, lambda name, start, n: block[:n], on_progress=on_progress, cancel=cancel
        )

    def close(self) -> None:
        """Give the memory back; arrays and addresses that were taken from here must not be used any more."""
        self._views = {}
        if self.mapping is not None:
            self.mapping.close()
        if self.file is not None:
            self.file.close()
        with suppress(BufferError):  # an array is still referenced; the memory is freed with it
            self.memory.close()


def blocks(data: U8) -> Iterator[memoryview]:
    """Yield an array in pieces; each is small enough to check for a cancellation only between two of them."""
    for start in range(0, len(data), _BLOCK_BYTES):
        yield data[start : start + _BLOCK_BYTES].data
