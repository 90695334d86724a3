"""Pictures with a part of their rows: a lossy method scores the patches of a tile, and the encoder keeps the best rows.

A row that is left out leaves no gap: our own encoder's rows have the positions of tokens, one after another.
"""

from dataclasses import replace
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from edgedec.companion import Companion
from edgedec.pictures import Block
from edgedec_runtimes.pictures.contract import PictureLayout


@runtime_checkable
class RowChooser(Companion, Protocol):
    """A method of edgedec.companion that leaves rows of pictures out."""

    @property
    def kept_share(self) -> float:
        """The share of a tile's rows that stay; 1 keeps all, and nothing is scored."""

    @property
    def choice(self) -> str:
        """What the choice of rows depends on, beside the picture and its encoder: ids of rows differ by it."""

    @property
    def reads_flow(self) -> bool:
        """Whether worth() reads the flow of each layer, else the mass of the last one (ec_encoder_encode)."""

    def worth(self, seen: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return f32[n_patches], a score of each patch, by f32[n_layer, n_patches] of flow, or f32[1, ...] of mass."""


def fewer(layout: PictureLayout, share: float) -> PictureLayout:
    """Return a layout whose blocks have a share of their rows, one row at least."""
    return replace(layout, blocks=tuple(_fewer(block, max(1, round(share * block.n_rows))) for block in layout.blocks))


def _fewer(block: Block, n_rows: int) -> Block:
    assert block.n_y == 1, "rows that fill a grid would leave gaps"
    return replace(block, n_rows=n_rows, n_x=n_rows)


def best_rows(worth: NDArray[np.float32], n_x: int, merge: int, share: float) -> NDArray[np.intp]:
    """Return the numbers of the rows that stay, ascending: those whose patches are worth most, of equals the first.

    Args:
        worth: The score of each patch, line after line.
        n_x: The patches of a line.
        merge: merge x merge patches become one row.
        share: The share of the rows that stay.
    """
    scores = worth.reshape(-1, merge, n_x // merge, merge).sum(axis=(1, 3), dtype=np.float64).ravel()
    return np.sort(np.argsort(-scores, kind="stable")[: max(1, round(share * scores.size))])
