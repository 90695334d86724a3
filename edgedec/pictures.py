"""Pictures of a prompt: their pixels, the rows that an encoder makes of them, and where these rows stand in a prompt.

A row of a forward may be a vector in place of a token. In a prompt's ids a row of a picture stands as a negative id,
which is a hash of the picture and of the row's number: so two prompts have the same ids exactly where they have the
same tokens and the same rows, and what compares ids (kept prompts, shared prefixes, saved ones) holds for pictures too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.memory_plan import MemoryTerm
from edgedec.progress import CancelToken, OnProgress


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels of a picture, upright: u8[height, width, 3] in one piece, rows from the top, red, green and blue."""

    width: int
    height: int
    rgb: bytes


@dataclass(frozen=True, slots=True)
class Block:
    """The form of rows that one part of a picture becomes.

    Attributes:
        n_rows: How many rows there are.
        n_x, n_y: Columns and rows of the grid that they fill, row after row. Models whose rotations have sections place
            each row by its column and row, and what follows max(n_x, n_y) places behind the block's start.
        mutual: Whether each row sees all rows of the block, also those behind it; such a block is one forward.
    """

    n_rows: int
    n_x: int
    n_y: int
    mutual: bool = False


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


@dataclass(frozen=True, slots=True)
class PictureRows:
    """One encoded block.

    Attributes:
        block: Its form.
        rows: f32[block.n_rows, width]: the first n_embd numbers of a row take the place of a token's embedding; each
            further n_embd of them are added to the state behind one layer more, from layer 0 on.
        ids: The id of each row in a prompt, see row_ids().
    """

    block: Block
    rows: NDArray[np.float32]
    ids: tuple[int, ...]

    def __post_init__(self) -> None:
        n = self.block.n_rows
        if self.rows.ndim != 2 or len(self.rows) != n or len(self.ids) != n or n < 1 or max(self.ids) >= 0:
            raise RequestError(
                f"a picture's block of {n} rows has rows of the shape {self.rows.shape} and {len(self.ids)} ids; "
                "give as many of both, with negative ids"
            )


class PictureEncoder(Protocol):
    """Makes rows of pictures, for one text model. Any thread may call it; it works on one picture at a time."""

    def layout(self, width: int, height: int) -> PictureLayout:
        """Return what a picture of that size becomes; no pixel is looked at (RequestError where it can't be taken)."""

    def encode(
        self, picture: Picture, cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> tuple[PictureRows, ...]:
        """Return the blocks of layout() with their rows; a picture that comes again may be answered from memory.

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
    from hashlib import sha256

    hashes = (sha256(key + i.to_bytes(8, "little")).digest() for i in range(first, first + n_rows))
    return tuple(-1 - (int.from_bytes(digest[:8], "big") >> 2) for digest in hashes)


Pictures = Mapping[int, PictureRows]
"""Blocks by the ids of their first rows: what a prompt's negative ids are looked up in."""


def by_first_id(blocks: Iterable[PictureRows]) -> dict[int, PictureRows]:
    """Return blocks by the ids of their first rows."""
    return {block.ids[0]: block for block in blocks}


class PlacedRows(NamedTuple):
    """Where a block stands in a prompt: the index of its first row, that behind its last one, and the block."""

    start: int
    end: int
    picture: PictureRows


def placed(token_ids: Sequence[int], pictures: Pictures) -> Iterator[PlacedRows]:
    """Yield the blocks that stand in a prompt, in order.

    Raises:
        RequestError: A negative id begins no block, or the ids behind it are not those of the block.
    """
    end = 0
    for i, token_id in enumerate(token_ids):
        if token_id >= 0 or i < end:
            continue
        found = pictures.get(token_id)
        if found is None or tuple(token_ids[i : i + len(found.ids)]) != found.ids:
            raise RequestError(
                f"token {i} of the prompt is {token_id}, which stands for no token and for no row of a picture that "
                "came with the prompt; give the pictures that the prompt was made with, each one whole"
            )
        end = i + len(found.ids)
        yield PlacedRows(i, end, found)
