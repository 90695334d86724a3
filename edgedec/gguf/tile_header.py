"""The header of a tile file: which tensors' tiles the file holds, where, and of which model.

A tile file holds the rearranged matrices of one model. It may also hold all else that the model's GGUF holds: the
GGUF's header, under the name "", and the other tensors as they are there. Such a file can take the place of the GGUF,
which can be made again from it.

The file, little endian, holds: a magic, u32 version, u32 length of the header, u64 size of the file, the SHA-256 of all
that and of the JSON; JSON {layout, header_hash, n_model_bytes, model_sha256, tensors: [[name, n_bytes, CRC-32], ...],
n_plain}, filled up with spaces; the tensors in that order, each at the next multiple of 64 bytes. The last n_plain are
as in the GGUF, the others tiles.
"""

import hashlib
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from edgedec.errors import ModelFormatError
from edgedec.gguf.places import TILE_MAGIC

HEADER_NAME = ""
"""The name under which a tile file holds the header of the GGUF; no tensor has it."""
ALIGNMENT = 64
VERSION = 2

_FIXED = struct.Struct("<16sIIQ32s")
_N_SIGNED = _FIXED.size - 32
_MAX_HEADER_BYTES = 1 << 27
REMEDY = "they are made anew when the model is loaded"


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
class TileHeader:
    """The contents of a tile file's header.

    Attributes:
        layout: Version of the arrangement of the tiles.
        header_hash: GGUF.header_hash of the model.
        n_model_bytes: Size of the model's files together.
        model_sha256: SHA-256 (hex) of the model's files, one after the other.
        tensors: The tensors whose tiles the file holds, in its order.
        crcs: CRC-32 of each tensor's tiles.
        n_plain: How many tensors at the end are as in the GGUF; the first of these is the GGUF's header. 0 where the
            file holds only matrices.
    """

    layout: str
    header_hash: str
    n_model_bytes: int
    model_sha256: str
    tensors: tuple[TileTensor, ...]
    crcs: tuple[int, ...]
    n_plain: int = 0

    @property
    def n_matrices(self) -> int:
        """The number of tensors that are tiles."""
        return len(self.tensors) - self.n_plain

    @property
    def matrices_end(self) -> int:
        """The byte of the file at which the tiles end; what is plain begins there."""
        return place(self.tensors[: self.n_matrices], len(self._json()) + _FIXED.size)[-1]

    def offsets(self) -> tuple[int, ...]:
        """Return the byte at which each tensor's tiles begin, and last the size of the file."""
        return place(self.tensors, len(self._json()) + _FIXED.size)

    def places(self) -> dict[str, int]:
        """Return the byte of the file at which each tensor's tiles begin, by the tensor's name."""
        return dict(zip((tensor.name for tensor in self.tensors), self.offsets(), strict=False))

    def encode(self) -> bytes:
        """Return the header in bytes, as many whatever the SHA-256 and the CRCs are."""
        text = self._json()
        signed = _FIXED.pack(TILE_MAGIC, VERSION, _FIXED.size + len(text), self.offsets()[-1], bytes(32))[:_N_SIGNED]
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
                "n_plain": self.n_plain,
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


def read_tile_header(path: Path, label: str = "") -> TileHeader:
    """Return the header of a tile file, which was checked against the file's size.

    Args:
        label: The model's name, for messages; "" for the file's name.

    Raises:
        ModelFormatError: The file is no tile file, is of another version, cut short or damaged.
        OSError: The file can't be read.
    """
    with path.open("rb") as file:
        return checked_header(file, label or path.name)


def damaged(label: str, what: str) -> ModelFormatError:
    return ModelFormatError(f"the tiles of {label} are damaged: {what}; {REMEDY}")


def checked_header(file: BinaryIO, label: str) -> TileHeader:
    n_file_bytes = os.fstat(file.fileno()).st_size
    fixed = file.read(_FIXED.size)
    if len(fixed) < _FIXED.size or not fixed.startswith(TILE_MAGIC):
        raise damaged(label, "their file does not begin as one")
    _, version, n_header, n_bytes, digest = _FIXED.unpack(fixed)
    if version != VERSION:
        raise ModelFormatError(f"the tiles of {label} have the version {version}, expected {VERSION}; {REMEDY}")
    if n_bytes != n_file_bytes:
        raise damaged(label, f"their file has {n_file_bytes} bytes, expected {n_bytes}")
    if not _FIXED.size <= n_header <= min(n_file_bytes, _MAX_HEADER_BYTES):
        raise damaged(label, f"the length of their file's header is {n_header}")
    text = file.read(n_header - _FIXED.size)
    if hashlib.sha256(fixed[:_N_SIGNED] + text).digest() != digest:
        raise damaged(label, "their file's header has another checksum")
    try:
        header = _decode(text)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(label, f"their file's header can't be read ({error})") from error
    if header.offsets()[-1] != n_file_bytes:
        raise damaged(label, f"their file has {n_file_bytes} bytes, expected {header.offsets()[-1]}")
    return header


def _decode(text: bytes) -> TileHeader:
    values = json.loads(text)
    rows = [(str(name), int(n_bytes), int(crc, 16)) for name, n_bytes, crc in values["tensors"]]
    if min((n_bytes for _, n_bytes, _ in rows), default=0) < 0:
        raise ValueError("a tensor of negative size")
    n_plain = int(values["n_plain"])
    if not 0 <= n_plain <= len(rows) or (n_plain and rows[-n_plain][0] != HEADER_NAME):
        raise ValueError("the GGUF's header is not where it should be")
    return TileHeader(
        str(values["layout"]),
        str(values["header_hash"]),
        int(values["n_model_bytes"]),
        str(values["model_sha256"]),
        tuple(TileTensor(name, n_bytes) for name, n_bytes, _ in rows),
        tuple(crc for _, _, crc in rows),
        n_plain,
    )
