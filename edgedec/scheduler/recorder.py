"""Recordings of what drafters propose at every position of a text."""

from collections.abc import Callable, Sequence

import numpy as np

from edgedec.model import LayerSet
from edgedec.scheduler.draft_tree import DraftTree
from edgedec.sequence import Evaluated, Proposals


def share_of_halves(layers: LayerSet) -> float:
    """Return the share of the half-layers that run: the share of a token's bytes if all of them were equally large.

    >>> share_of_halves(LayerSet.of(4, [0, 1, 3]))
    0.75
    """
    return float(np.mean([layers.attn, layers.mlp]))


class Recorder:
    """Records what is proposed at every position of one text, and the forwards that this takes.

    Args:
        rows: Gets an entry for each position.
        share: `(half-layers)` -> the share of a token's bytes that these and the head of the target read.
    """

    def __init__(self, rows: list[Proposals], share: Callable[[LayerSet], float] = share_of_halves) -> None:
        self._rows = rows
        self._share = share
        self._begin()

    def _begin(self) -> None:
        self._evaluated: list[Evaluated] = []
        self._after: list[int] = []
        self._n_noted = 0  # forwards that were made for drafts which drafted() noted

    def evaluated(self, n_rows: int, part: LayerSet | float | None) -> None:
        """Note a forward over `n_rows` rows.

        Args:
            n_rows: The rows.
            part: The half-layers that it goes through besides the output matrix; or the share of a token's bytes that
                it reads, as for a trained head; or None for a draft model's.
        """
        self._evaluated.append(Evaluated(n_rows, self._share(part) if isinstance(part, LayerSet) else part))

    def drafted(self, places: Sequence[int], depths: Sequence[int]) -> None:
        """Note after which forward each node of a draft was known.

        In a draft of depth d that took f forwards, a node of depth i counts as known after f * i / d forwards, rounded
        up. That is exact where each depth takes one forward.

        Args:
            places: By node, its index in the tree of all drafts; new nodes have the next indices.
            depths: By node, how many tokens deep it is.
        """
        before, n_made = self._n_noted, len(self._evaluated) - self._n_noted
        self._n_noted += n_made
        for place, depth in zip(places, depths, strict=True):
            if place == len(self._after):
                self._after.append(before + -(-n_made * depth // max(depths)))

    def end(self, tree: DraftTree, paths: Sequence[float], draft_s: float) -> None:
        """Add the entry of a position, whose drafting took `draft_s` seconds, and begin the next position."""
        nodes = tuple(tree.tokens), tuple(tree.parents), tuple(paths)
        self._rows.append(Proposals(*nodes, draft_s, tuple(self._evaluated), tuple(self._after)))
        self._begin()
