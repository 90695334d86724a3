"""Recordings of what drafters propose at every position of a text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

import numpy as np

from edgedec.api.engine import Engine
from edgedec.api.requests import Prompt, SamplingOptions
from edgedec.callers import checks_arguments
from edgedec.decoding.generate import TokenStream, finished
from edgedec.drafter import ProposalLog
from edgedec.model import LayerSet
from edgedec.sequence import Generation


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A forward that was made for a draft.

    Attributes:
        n_rows: Rows of the forward.
        share: Bytes of weights that the forward read, as a share of those that a token of the target reads; None for a
            forward of a draft model.
    """

    n_rows: int
    share: float | None


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposals of all drafters at one position of a text, merged into one tree.

    Attributes:
        tokens: By node, its token.
        parents: By node, the index of its parent; -1 where the node follows the text.
        paths: By node, P(path to the node accepted), as it was estimated then.
        draft_s: Seconds that drafting took.
        evaluated: The forwards that drafting made, in their order; none for drafters that look tokens up.
        after: By node, how many of these forwards were made when the node was known; empty where that is not recorded.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    paths: tuple[float, ...]
    draft_s: float
    evaluated: tuple[Evaluated, ...] = ()
    after: tuple[int, ...] = ()

    def as_dict(self) -> dict[str, object]:
        """Return the attributes as plain types for JSON."""
        return {
            "tokens": list(self.tokens),
            "parents": list(self.parents),
            "paths": [round(path, 4) for path in self.paths],
            "draft_s": round(self.draft_s, 6),
            "evaluated": [[made.n_rows, made.share and round(made.share, 4)] for made in self.evaluated],
            "after": list(self.after),
        }


@checks_arguments
def record_text(engine: Engine, prompt: Prompt, log: ProposalLog, **options: Unpack[SamplingOptions]) -> Generation:
    """Generate plainly, and tell `log` what the drafters propose after every token.

    Args:
        prompt: The text or the token ids to go on from.
        log: Notes the proposals, and the forwards that drafting makes.
        **options: The fields of SamplingParams.
    """
    request = replace(engine.requests.plain(prompt, options), record=log)
    return finished(TokenStream(engine.pool, request))


def share_of_halves(layers: LayerSet) -> float:
    """Return the share of the half-layers that run: the share of a token's bytes if all of them were equally large.

    >>> share_of_halves(LayerSet.of(4, [0, 1, 3]))
    0.75
    """
    return float(np.mean([layers.attn, layers.mlp]))


class Recorder:
    """Records what is proposed at every position of one text, and the forwards that this takes.

    Implements edgedec.drafter.ProposalLog.

    Args:
        share: `(half-layers)` -> the share of a token's bytes that these and the head of the target read.

    Attributes:
        rows: An entry for each position so far.
    """

    def __init__(self, share: Callable[[LayerSet], float] = share_of_halves) -> None:
        self.rows: list[Proposals] = []
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

    def end(self, tokens: Sequence[int], parents: Sequence[int], paths: Sequence[float], draft_s: float) -> None:
        """Add the entry of a position, whose drafting took `draft_s` seconds, and begin the next position."""
        nodes = tuple(tokens), tuple(parents), tuple(paths)
        self.rows.append(Proposals(*nodes, draft_s, tuple(self._evaluated), tuple(self._after)))
        self._begin()
