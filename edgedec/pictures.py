"""Pictures of a prompt: the rows that an encoder makes of them, where these stand in a prompt, and who makes them.

A row of a forward may be a vector in place of a token. In a prompt's ids a row of a picture stands as a negative id,
which is a hash of the picture and of the row's number: so two prompts have the same ids exactly where they have the
same tokens and the same rows, and what compares ids (kept prompts, shared prefixes, saved ones) holds for pictures too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.memory_plan import MemoryTerm
from edgedec.progress import CancelToken, OnProgress
from edgedec.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Block:
    """The form of rows that one part of a picture becomes.

    Attributes:
        n_rows: How many rows there are.
        n_x, n_y: Columns and rows of the grid that they fill, row after row. Models whose rotations have sections place
            each row by its column and row, and what follows max(n_x, n_y) places behind the block's start.
        mutual: Whether each row sees all rows of the block, also those behind it; such a block is one forward.
        first: How many of the block's rows the session has cached already; a forward goes on behind them.
    """

    n_rows: int
    n_x: int
    n_y: int
    mutual: bool = False
    first: int = 0


@dataclass(frozen=True, slots=True)
class PictureRows:
    """One encoded block.

    Attributes:
        block: Its form.
        rows: f32[block.n_rows, width]: the first n_embd numbers of a row take the place of a token's embedding; each
            further n_embd of them are added to the state behind one layer more, from layer 0 on.
        ids: The id of each row in a prompt, a hash of the picture and of the row's number.
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


Pictures = Mapping[int, PictureRows]
"""Blocks by the ids of their first rows: what a prompt's negative ids are looked up in."""


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
        picture = pictures.get(token_id)
        if picture is None or tuple(token_ids[i : i + len(picture.ids)]) != picture.ids:
            raise RequestError(
                f"token {i} of the prompt is {token_id}, which stands for no token and for no row of a picture that "
                "came with the prompt; give the pictures that the prompt was made with, each one whole"
            )
        end = i + len(picture.ids)
        yield PlacedRows(i, end, picture)


class PictureReader(Protocol):
    """Makes prompts and rows of messages with pictures (edgedec_runtimes.pictures).

    Between its calls a picture is a value with `marker`, `name`, `width`, `height`, `layout` and `n_rows`.
    """

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], tuple[Any, ...]]:
        """Return messages with a mark in place of each picture, and the pictures, of which nothing is decoded yet."""

    def ids(self, tokenizer: Tokenizer, text: str, pictures: Sequence[Any], n_most: int) -> list[int]:
        """Return the ids of a rendered prompt (PromptTooLongError above `n_most`)."""

    def rows(
        self, pictures: Sequence[Any], cancel: CancelToken | None = None, on_progress: OnProgress | None = None
    ) -> Pictures:
        """Return the rows of pictures."""

    def terms(self) -> tuple[MemoryTerm, ...]:
        """Return what all of this takes."""

    def close(self) -> None:
        """Free everything."""


def has_pictures(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Return whether a message has a part of the type "image", or "images"."""
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content if isinstance(part, Mapping)]
    return any(message.get("images") for message in messages) or any(part.get("type") == "image" for part in parts)
