"""Drafters that are a part of the target: its own session, through some of its half-layers.

A draft is evaluated in place, behind the text, and the verification begins at the old n_past, which drops what the
draft wrote: there is no copy of the KV cache, and nothing to roll back (Draft & Verify, Zhang et al. 2023,
arXiv:2309.08168, and SWIFT, Xia et al. 2024, arXiv:2410.06161, copy or crop it). The session is touched within
propose() only.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from time import monotonic, perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, Draws, Verification
from edgedec.draft_constants import ODD, SAMPLES
from edgedec.drafter import DraftContext
from edgedec.drafter_traits import DraftCost, DrafterTraits
from edgedec.drafters.draft_builder import DraftBuilder, Level
from edgedec.errors import CancelledError
from edgedec.model import Forward, LayerSet

Hidden = Mapping[int, NDArray[np.float32]]

_LEAST_LEAF = 0.05  # a leaf of a smaller path probability is left out: a row more takes about as much of a step
_SHARE_DIGITS = 2  # shares of the weights that differ by less are timed together
_STORED = "own layers"  # the key of these times in the drafters' store


class PartTimes:
    """The times of one row through shares of the weights, in times of a whole row; they outlive a text.

    The time of a share that was never timed is interpolated between those that were, 0 and 1.

    >>> parts = PartTimes()
    >>> parts.ratio(0.6)
    0.6
    >>> parts.observe(0.5, 0.006, whole_s=0.010)
    >>> parts.ratio(0.5), parts.ratio(0.25), parts.ratio(0.75)
    (0.6, 0.3, 0.8)
    """

    def __init__(self) -> None:
        self._samples: dict[float, deque[float]] = {}

    def observe(self, share: float, seconds: float, whole_s: float | None) -> None:
        """Take the measured seconds of one row through half-layers that hold this share, where a whole one is known."""
        if whole_s is not None and whole_s > 0:
            ratios = self._samples.setdefault(round(share, _SHARE_DIGITS), deque(maxlen=SAMPLES))
            ratios.append(min(seconds / whole_s, ODD * share))

    def expect(self, share: float, ratio: float) -> None:
        """Take the expected time of one row through this share of the weights, unless it was timed."""
        self._samples.setdefault(round(share, _SHARE_DIGITS), deque([ratio], maxlen=SAMPLES))

    def ratio(self, share: float) -> float:
        """Return the time of one row through this share of the weights."""
        ratios_at = sorted({0.0: 0.0, 1.0: 1.0, **{at: median(ratios) for at, ratios in self._samples.items()}}.items())
        above = next(i for i, (at, _) in enumerate(ratios_at) if at >= share and i)
        (low, low_ratio), (high, high_ratio) = ratios_at[above - 1], ratios_at[above]
        return low_ratio + (high_ratio - low_ratio) * (share - low) / (high - low)


class OwnLayersDrafter:
    """What drafters have in common that draft with the target's own session; a subclass says with which layers.

    Args:
        label: Sets the drawn numbers apart from those of the generation's other drafters.

    Attributes:
        ids: The text's tokens.
        parts: What forwards through some of the layers take.
    """

    def __init__(self, context: DraftContext, label: int) -> None:
        from edgedec.drafters.levels import LevelMaker  # only now, as a start of `auto` asks for promises alone

        self.context = context
        self.ids: list[int] = []
        with context.store.lock:
            self.parts: PartTimes = context.store.setdefault(_STORED, PartTimes())
        self._levels = LevelMaker(context, context.target.model.card.n_vocab, label)

    def traits_of(self, share: float, rate: float) -> DrafterTraits:
        """Return the traits of forwards of the target through this share of the weights, accepted at this rate."""
        whole_s = self.context.curve.seconds(1)
        level_s = None if whole_s is None else whole_s * self.parts.ratio(share)
        return DrafterTraits(DraftCost.TARGET, Draws.CHAINS, rate, level_s)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt; the session holds it when the first draft is requested."""
        self.ids = list(token_ids)
        self._levels.begin()

    def learn(self, verification: Verification, hidden: Hidden) -> None:
        """Take the tokens that the text got."""
        self.ids.extend(verification.token_ids)

    @property
    def n_past(self) -> int:
        """Tokens of the text that the session holds: all but the last."""
        return len(self.ids) - 1

    def is_ready(self, deadline_s: float) -> bool:
        """Return whether the session holds the text, one more row has room, and there is time before the deadline."""
        session = self.context.target
        is_held = 0 <= self.n_past <= session.n_cached and self.n_past < session.n_ctx
        return is_held and monotonic() <= deadline_s

    def draft_with(
        self, layers: LayerSet, share: float, n_max: int, deadline_s: float, *, n_levels: int | None = None
    ) -> Draft:
        """Draft a chain, and leaves beside it, for as long as one more token is likely to be worth its forward.

        Args:
            layers: The half-layers that run.
            share: Their share of a whole token's weights.
            n_max: Most nodes.
            deadline_s: When to stop, on the monotonic clock.
            n_levels: Most tokens of the chain; None for as many as there may be nodes.

        Raises:
            EdgedecError: As Session.forward, but for CancelledError: a cancelled forward ends the draft.
        """
        n_levels = min(n_levels or n_max, n_max, self.context.target.room(len(self.ids)))
        if n_levels < 1 or not self.is_ready(deadline_s):
            return EMPTY_DRAFT
        nodes, floor = DraftBuilder(n_max), self.context.floor.path_probability
        nodes.add_levels(
            self._levels_behind(layers, share, n_levels),
            deadline_s=deadline_s,
            least_path=floor or self.parts.ratio(share),
            least_leaf=max(_LEAST_LEAF, floor / 3),
            corrected=self.context.correction.corrected,
        )
        return nodes.build()

    def _levels_behind(self, layers: LayerSet, share: float, n_levels: int) -> Iterator[Level]:
        """Yield the levels behind the text, each one evaluated when it is needed, until a forward is cancelled."""
        text = list(self.ids)
        for _ in range(n_levels):
            try:
                forward = self._forward(text[-1], len(text) - 1, layers, share)
            except CancelledError:
                return
            level = self._levels.level(forward, 0, text)
            yield level
            text.append(level.tokens[0])

    def _forward(self, token: int, n_past: int, layers: LayerSet, share: float) -> Forward:
        """Evaluate one drafted token, and note how long that took."""
        started = perf_counter()
        forward = self.context.target.forward(np.array([token], np.int32), n_past=n_past, layers=layers, rows="last")
        self.parts.observe(share, perf_counter() - started, self.context.curve.seconds(1, self.n_past))
        if self.context.recorder is not None:
            self.context.recorder.evaluated(1, layers)
        return forward

    def memory_bytes(self) -> int:
        """Return the bytes of the text's tokens; the KV cache is the target's."""
        return 16 * len(self.ids)
