"""A tile file: the rearranged matrices of one model, whose head is checked before the file is mapped.

The file, little endian, holds: a magic, u32 version, u32 length of the head, u64 size of the file, the SHA-256 of all
that and of the JSON; JSON {layout, header_hash, n_model_bytes, model_sha256, tensors: [[name, n_bytes, CRC-32], ...]},
filled up with spaces; the tiles in that order, each at the next multiple of 64 bytes. It is mapped from its first byte,
so that any page size will do.

Each start checks the head and the size of the file, so it notices every cut and every change of the head.
`Tiles.verify` reads all tiles and finds any change in them. A forward fails where the file is cut short or changed
while it is mapped (edgedec_runtimes.cpu.mapping).
"""

import hashlib
import json
import mmap
import os
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.progress import CancelToken, OnProgress, Progress
from edgedec_runtimes.cpu.mapping import Mapping

ALIGNMENT = 64
VERSION = 1
_MAGIC = b"edgedec tiles\r\n\0"
_FIXED = struct.Struct("<16sIIQ32s")
_N_SIGNED = _FIXED.size - 32
_MAX_HEAD_BYTES = 1 << 27
_BLOCK_BYTES = 1 << 24
_REMEDY = "they are made anew when the model is loaded"

MAPPED, MAPPED_HUGE = "mapped", "mapped, in huge pages"
PRIVATE, PRIVATE_HUGE = "private", "private, in huge pages"

U8 = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class TileTensor:
    """The name of a matrix and the size of its tiles.

    Attributes:
        unit_bytes: Tiles can be made in pieces of multiples of this size; 0: only all of them at once.
    """

    name: str
    n_bytes: int
    unit_bytes: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class TileHead:
    """The contents of a tile file's head.

    Attributes:
        layout: Version of the arrangement of the tiles.
        header_hash: GGUF.header_hash of the model.
        n_model_bytes: Size of the model's files together.
        model_sha256: SHA-256 (hex) of the model's files, one after the other.
        tensors: The tensors whose tiles the file holds, in its order.
        crcs: CRC-32 of each tensor's tiles.
    """

    layout: str
    header_hash: str
    n_model_bytes: int
    model_sha256: str
    tensors: tuple[TileTensor, ...]
    crcs: tuple[int, ...]

    def offsets(self) -> tuple[int, ...]:
        """Return the byte at which each tensor's tiles begin, and last the size of the file."""
        return place(self.tensors, len(self._json()) + _FIXED.size)

    def places(self) -> dict[str, int]:
        """Return the byte of the file at which each tensor's tiles begin, by the tensor's name."""
        return dict(zip((tensor.name for tensor in self.tensors), self.offsets(), strict=False))

    def encode(self) -> bytes:
        """Return the head in bytes, as many whatever the SHA-256 and the CRCs are."""
        text = self._json()
        signed = _FIXED.pack(_MAGIC, VERSION, _FIXED.size + len(text), self.offsets()[-1], bytes(32))[:_N_SIGNED]
        return signed + hashlib.sha256(signed + text).digest() + text

    def _json(self) -> bytes:
        rows = [[t.name, t.n_bytes, f"{crc:08x}"] for t, crc in zip(self.tensors, self.crcs, strict=True)]
        text = json.dumps(
            {
                "layout": self.layout,
                "header_hash": self.header_hash,
                "n_model_bytes": self.n_model_bytes,
                "model_sha256": self.model_sha256,
                "tensors": rows,
            }
        ).encode()
        return text + b" " * (-len(text) % ALIGNMENT)


def place(tensors: Sequence[TileTensor], start: int = 0) -> tuple[int, ...]:
    """Return the offset of each tensor when the first is placed at `start`, and last the end of all of them.

    >>> place([TileTensor("a", 100), TileTensor("b", 64), TileTensor("c", 1)])
    (0, 128, 192, 193)
    """
    offsets, end = [], start
    for tensor in tensors:
        end += -end % ALIGNMENT
        offsets.append(end)
        end += tensor.n_bytes
    return (*offsets, end)


def read_tile_head(path: Path, label: str = "") -> TileHead:
    """Return the head of a tile file, which was checked against the file's size.

    Args:
        path: The file.
        label: The model's name, for messages; "" for the file's name.

    Raises:
        ModelFormatError: The file is no tile file, is of another version, cut short or damaged.
        OSError: The file can't be read.
    """
    with path.open("rb") as file:
        return _read_head(file, label or path.name)


def map_tiles(path: Path, label: str = "") -> "Tiles":
    """Return the tiles of a file, mapped to be read only and shared with other processes.

    Raises:
        ModelFormatError: The file's head is refused, as by read_tile_head.
        OSError: The file can't be read or mapped.
    """
    label = label or path.name
    with ExitStack() as undo:
        file = undo.enter_context(path.open("rb"))
        head = _read_head(file, label)
        n_bytes = os.fstat(file.fileno()).st_size
        buffer = mmap.mmap(file.fileno(), n_bytes, access=mmap.ACCESS_READ)
        tiles = Tiles(buffer, head, label, path, file)
        undo.pop_all()
        return tiles


def read_tiles(
    file: BinaryIO,
    head: TileHead,
    label: str,
    place: Callable[[str, int, int], U8],
    *,
    phase: str = "verify",
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> None:
    """Read all tiles of a file to memory and compare them with their CRCs.

    Args:
        file: The file.
        head: The file's head.
        label: The model's name, for messages and progress.
        place: Called with a tensor's name, a byte of its tiles and a number of bytes; returns memory (uint8) for these.
        phase: The phase of the progress.
        on_progress: Called after each block.
        cancel: Stops the reading between two blocks.

    Raises:
        ModelFormatError: The tiles are damaged, or can't be read.
        CancelledError: `cancel` was cancelled.
    """
    done, total = 0, sum(tensor.n_bytes for tensor in head.tensors)
    for tensor, offset, expected in zip(head.tensors, head.offsets(), head.crcs, strict=False):
        crc = 0
        for start in range(0, tensor.n_bytes, _BLOCK_BYTES):
            if cancel is not None:
                cancel.check(f"{phase} {label}")
            out = place(tensor.name, start, min(_BLOCK_BYTES, tensor.n_bytes - start))
            read_into(file, offset + start, out, label)
            crc = zlib.crc32(out.data, crc)
            done += len(out)
            if on_progress is not None:
                on_progress(Progress(phase, done, total, "bytes", label))
        if crc != expected:
            raise _damaged(label, f"of {tensor.name!r} they have the CRC-32 {crc:08x}, expected {expected:08x}")


def read_into(file: BinaryIO, offset: int, out: U8, label: str) -> None:
    """Fill `out` with the bytes of a tile file from `offset` on (ModelFormatError where they can't be read)."""
    rest = out.data
    try:
        file.seek(offset)
        while rest:
            n = file.readinto(rest)  # type: ignore[attr-defined]  # a binary file
            if not n:
                raise _damaged(label, f"their file ends at {offset} bytes")
            offset, rest = offset + n, rest[n:]
    except OSError as error:
        raise _damaged(label, f"reading them failed ({error.strerror or error})") from error


class Tiles:
    """The tiles of a model by tensor name, in a mapped file or in private memory. Leaving its context closes them.

    A tile file that is deleted or replaced stays valid for the processes that have mapped it.

    Attributes:
        head: The head of the tile file, or the same for private memory.
        label: The model's name, for messages.
        path: The file of `file`; None without it.
        file: The tile file, open until close(); None where the tiles were made in memory or copied from it whole.
        mapping: Watches `file` and the memory; None without it.
        held_as: How memory holds the tiles: MAPPED, MAPPED_HUGE, PRIVATE or PRIVATE_HUGE, phrases for a person.
        n_bytes: What the tiles take, head and padding included.
    """

    def __init__(
        self, buffer: mmap.mmap, head: TileHead, label: str, path: Path | None = None, file: BinaryIO | None = None
    ) -> None:
        """Take over memory that holds the tiles at the head's offsets, and the file that is mapped there or copied."""
        self.head = head
        self.label = label
        self.path = path
        self.file = file
        self.mapping: Mapping | None = None
        self.held_as = PRIVATE if file is None else MAPPED
        self.n_bytes = len(buffer)
        self._buffer = buffer
        whole: U8 = np.frombuffer(buffer, np.uint8)
        whole.flags.writeable = False
        if file is not None:
            self.mapping = Mapping(whole.ctypes.data, len(buffer), file.fileno())
        self._views = {
            tensor.name: whole[offset : offset + tensor.n_bytes]
            for tensor, offset in zip(head.tensors, head.offsets(), strict=False)
        }

    def __enter__(self) -> Self:
        """Return the tiles."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def __getitem__(self, name: str) -> U8:
        """Return a tensor's tiles, uint8[n_bytes]: read only, at a multiple of 64 bytes, valid until close."""
        return self._views[name]

    @property
    def mapped(self) -> bool:
        """Whether the memory is the pages of the file, which processes share."""
        return self.held_as in (MAPPED, MAPPED_HUGE)

    @property
    def memory(self) -> mmap.mmap:
        """The mapping or the private memory that holds the tiles at the head's offsets."""
        return self._buffer

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
            self.file, self.head, self.label, lambda name, start, n: block[:n], on_progress=on_progress, cancel=cancel
        )

    def close(self) -> None:
        """Give the memory back; arrays and addresses that were taken from here must not be used any more."""
        self._views = {}
        if self.mapping is not None:
            self.mapping.close()
        if self.file is not None:
            self.file.close()
        with suppress(BufferError):  # an array is still referenced; the memory is freed with it
            self._buffer.close()


def blocks(data: U8) -> Iterator[memoryview]:
    """Yield an array in pieces; each is small enough to check for a cancellation only between two of them."""
    for start in range(0, len(data), _BLOCK_BYTES):
        yield data[start : start + _BLOCK_BYTES].data


def _damaged(label: str, what: str) -> ModelFormatError:
    return ModelFormatError(f"the tiles of {label} are damaged: {what}; {_REMEDY}")


def _read_head(file: BinaryIO, label: str) -> TileHead:
    n_file_bytes = os.fstat(file.fileno()).st_size
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size or not fixed.startswith(_MAGIC):
        raise _damaged(label, "their file does not begin as one")
    _, version, n_head, n_bytes, digest = _FIXED.unpack(fixed)
    if version != VERSION:
        raise ModelFormatError(f"the tiles of {label} have the version {version}, expected {VERSION}; {_REMEDY}")
    if n_bytes != n_file_bytes:
        raise _damaged(label, f"their file has {n_file_bytes} bytes, expected {n_bytes}")
    if not _FIXED.size <= n_head <= min(n_file_bytes, _MAX_HEAD_BYTES):
        raise _damaged(label, f"the length of their file's head is {n_head}")
    text = file.read(n_head - _FIXED.size)
    if hashlib.sha256(fixed[:_N_SIGNED] + text).digest() != digest:
        raise _damaged(label, "their file's head has another checksum")
    try:
        head = _decode(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise _damaged(label, f"their file's head can't be read ({error})") from error
    if head.offsets()[-1] != n_file_bytes:
        raise _damaged(label, f"their file has {n_file_bytes} bytes, expected {head.offsets()[-1]}")
    return head


def _decode(text: bytes) -> TileHead:
    values = json.loads(text)
    rows = [(str(name), int(n_bytes), int(crc, 16)) for name, n_bytes, crc in values["tensors"]]
    if min((n_bytes for _, n_bytes, _ in rows), default=0) < 0:
        raise ValueError("a tensor of negative size")
    return TileHead(
        str(values["layout"]),
        str(values["header_hash"]),
        int(values["n_model_bytes"]),
        str(values["model_sha256"]),
        tuple(TileTensor(name, n_bytes) for name, n_bytes, _ in rows),
        tuple(crc for _, _, crc in rows),
    )
