"""Pictures of a prompt: their pixels, the rows that an encoder makes of them, and where these rows stand in a prompt.

A row of a forward may be a vector in place of a token. In a prompt's ids a row of a picture stands as a negative id,
which is a hash of the picture and of the row's number: so two prompts have the same ids exactly where they have the
same tokens and the same rows, and whatever compares ids (kept prompts, shared prefixes, saved ones) holds for pictures
too.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.memory_plan import MemoryTerm
from edgedec.progress import CancelToken, OnProgress

if TYPE_CHECKING:  # a model imports this file
    from edgedec.tokenizer import Tokenizer

_ID_BITS = 62


@dataclass(frozen=True, slots=True)
class Picture:
    """Pixels of a picture, upright and without transparency.

    Attributes:
        width, height: In pixels, at least 1.
        rgb: u8[height, width, 3] in one piece: the rows from the top, red, green and blue of each pixel from the left.
    """

    width: int
    height: int
    rgb: bytes


@dataclass(frozen=True, slots=True)
class Block:
    """The form of rows that one part of a picture becomes.

    Attributes:
        n_rows: How many rows there are.
        n_x, n_y: Columns and rows of the grid that they lie in, row after row from the top. Models with rotations in
            sections place each row by its column and row, and the text behind the block max(n_x, n_y) places behind
            the block's start. n_x * n_y is n_rows, but where rows stand between the grid's rows.
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
        parts: What stands in the prompt, in order: a text of marks, which the text model's vocabulary makes into
            tokens, special ones included; or the index of a block.
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
        rows: f32[block.n_rows, width]. The first n_embd numbers of a row take the place of a token's embedding; each
            further n_embd of them are added to the states behind one layer more, from layer 0 on.
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
            RequestError: The picture can't be taken.
            CancelledError: `cancel` was cancelled.
            RuntimeLostError: What encodes was lost; the next call starts it again.
        """

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Return what the process, and the processes that it starts, hold for pictures."""

    def close(self) -> None:
        """Free everything; calling it again does nothing."""


def row_ids(key: bytes, n_rows: int, first: int = 0) -> tuple[int, ...]:
    """Return the ids of rows `first` to `first + n_rows` - 1 of a picture.

    Each is -1 - (the first 62 bits of SHA-256 of the key and the row's number, in 8 bytes, the lowest first).

    Args:
        key: A hash of everything that changes a bit of the picture's rows: pixels, size, encoder and its settings.
        n_rows: How many ids.
        first: The first row's number among all rows of the picture.
    """
    hashes = (sha256(key + i.to_bytes(8, "little")).digest() for i in range(first, first + n_rows))
    return tuple(-1 - (int.from_bytes(digest[:8], "big") >> (64 - _ID_BITS)) for digest in hashes)


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Where a block stands in a prompt.

    Attributes:
        start: The index of its first row in the prompt.
        picture: The block.
    """

    start: int
    picture: PictureRows

    @property
    def end(self) -> int:
        """The index behind its last row."""
        return self.start + self.picture.block.n_rows


Pictures = Mapping[int, PictureRows]
"""Blocks by the ids of their first rows, see by_first_id()."""


def by_first_id(blocks: Iterable[PictureRows]) -> dict[int, PictureRows]:
    """Return blocks by the ids of their first rows: what a prompt's negative ids are looked up in."""
    return {block.ids[0]: block for block in blocks}


def placed(token_ids: Sequence[int], pictures: Pictures) -> Iterator[PlacedRows]:
    """Yield the blocks that stand in a prompt, from its start on.

    Raises:
        RequestError: A negative id begins no block, or the ids behind it are not those of the block.
    """
    i = 0
    while i < len(token_ids):
        if token_ids[i] >= 0:
            i += 1
            continue
        found = pictures.get(token_ids[i])
        if found is None or tuple(token_ids[i : i + len(found.ids)]) != found.ids:
            raise RequestError(
                f"token {i} of the prompt is {token_ids[i]}, which stands for no token and for no row of a picture "
                "that came with the prompt; give the pictures that the prompt was made with, each one whole"
            )
        yield PlacedRows(i, found)
        i += len(found.ids)


class PictureReader(Protocol):
    """Takes the pictures out of messages, and makes prompts and rows of them; opened by `picture_reader` (edgedec.own).

    Between its calls a picture is a value with `name`, `width`, `height`, `layout` and `n_rows`.
    """

    @property
    def processes(self) -> tuple[int, ...]:
        """The processes that read pictures now; see edgedec.runtime.HasProcesses."""

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], tuple[Any, ...]]:
        """Return messages with a mark in place of each picture, and the pictures; only their headers are looked at."""

    def ids(
        self, tokenizer: "Tokenizer", text: str, pictures: Sequence[Any], n_most: int, *, add_special: bool
    ) -> list[int]:
        """Return the ids of a rendered prompt whose marks stand for pictures (PromptTooLongError above `n_most`)."""

    def rows(
        self, pictures: Sequence[Any], cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> Pictures:
        """Return the rows of pictures; `on_progress` is told of those that are not kept from before."""

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Return what the process, and the processes that it starts, hold for pictures."""

    def close(self) -> None:
        """Free everything; calling it again does nothing."""


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has a picture: a part of the type "image", or a list of "images".

    >>> has_pictures([{"role": "user", "content": [{"type": "image", "image": b"..."}]}])
    True
    """
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    return any(message.get("images") for message in messages) or any(part.get("type") == "image" for part in parts)
