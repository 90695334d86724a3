"""A picture on its way to rows: its pixels, its layout in a prompt, and the contract of what encodes it."""

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.memory_plan import MemoryTerm
from edgedec.pictures import Block, PictureRows
from edgedec.progress import CancelToken, OnProgress


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels of a picture, upright: u8[height, width, 3] in one piece, rows from the top, red, green and blue."""

    width: int
    height: int
    rgb: bytes


@dataclass(frozen=True, slots=True)
class PictureLayout:
    """What a picture of known width and height becomes in a prompt.

    Attributes:
        parts: In order, a text of marks, which the text model's vocabulary makes into tokens, special ones included; or
            the index of a block.
        blocks: The blocks, each of which stands once.
    """

    parts: tuple[str | int, ...]
    blocks: tuple[Block, ...]

    @property
    def n_rows(self) -> int:
        """The rows of all blocks."""
        return sum(block.n_rows for block in self.blocks)


class PictureEncoder(Protocol):
    """Makes rows of pictures, for one text model. Any thread may call it; it works on one picture at a time."""

    @property
    def identity(self) -> str:
        """What a bit of a row depends on, beside the pixels and the projector file."""

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return what a picture of that size becomes; no pixel is looked at (RequestError where it can't be taken)."""

    def encode(
        self, picture: Picture, cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> list[NDArray[np.float32]]:
        """Return f32[n_rows, width] for each block of layout(), the rows that edgedec.pictures.PictureRows explains.

        Raises:
            RequestError, CancelledError: The picture can't be taken; `cancel` was cancelled.
            RuntimeLostError: What encodes was lost; the next call starts it again.
        """

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Return what the process, and the processes that it starts, hold for pictures."""

    def close(self) -> None:
        """Free everything; calling it again does nothing."""


def row_ids(key: bytes, n_rows: int, first: int = 0) -> tuple[int, ...]:
    """Return the ids of rows `first` to `first + n_rows` - 1 of a picture, by 62 bits of SHA-256 of key and number.

    `key` is a hash of everything that changes a bit of the rows: the picture, the encoder and its settings.
    """
    hashes = (sha256(key + i.to_bytes(8, "little")).digest() for i in range(first, first + n_rows))
    return tuple(-1 - (int.from_bytes(digest[:8], "big") >> 2) for digest in hashes)


def by_first_id(blocks: Iterable[PictureRows]) -> dict[int, PictureRows]:
    """Return blocks by the ids of their first rows."""
    return {block.ids[0]: block for block in blocks}
