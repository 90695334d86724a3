"""Early exit: the target's first layers, its last norm and its head draft, in its own session.

Early exit as in LayerSkip; the exit is chosen as in DEL: the hidden state of each layer at a position of the text,
tapped while the position was verified, is given to the head. Whether the head's token is the text's is counted, older
positions less and less. The layer and the length with the most expected tokens per second are drafted with. DEL gives
the head every layer at every position, which is dear with a wide vocabulary. Here eight layers go through the head in
one forward: of the first eight positions, then of one position in 16, and of fewer and fewer where no exit pays. Hidden
states are requested at these positions only.

Without those papers' training a model's early layers rarely agree with its last: where no exit promises more than plain
decoding, nothing is drafted. Their verification goes on from the exit's states; here it begins with the first layer.

Paper: LayerSkip (Elhoushi et al. 2024, arXiv:2404.16710), DEL (Zarch et al. 2025, arXiv:2504.05598)
Option: `--draft exit`
For: models trained to exit early
Measured: nothing yet, as no model trained so was at hand; qwen2.5-coder-1.5b drafts nothing, at 1.02 of plain decoding
    (`speed/layer_skip`, program at 832b325c)
Status: study
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec.cost_curve import DraftPrice, best_length
from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds
from edgedec.drafter_traits import Demands
from edgedec.errors import CancelledError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import ForwardItem, LayerSet, RowGroup, Span
from edgedec_methods.self_draft import Hidden, OwnLayersDrafter

NAME = "exit"
EXITS = 8  # layers that may be exits
_HEAD = 0.2  # about the head's share of the weights; once forwards were timed, their times count
_ALL = 8  # the first positions, all of which are judged
_EVERY, _SELDOM = 16, 512  # steps from one judged position to the next later: the fewest, and the most
_LEAST_GAIN = 1.0
_PLANNED_BYTES = 1_000_000  # for the hidden states of a position after each exit
_FORGET = 0.95
_PRIOR = 4.0  # samples
_MOST = 0.98
_DRAWS = 0x45786974447261  # sets the drawn numbers apart from those of other drafters


@dataclass(slots=True)
class Agreement:
    """How often each exit's token was the text's, in the judged positions, older ones less; kept between requests.

    >>> agreement = Agreement((1, 3), 5)
    >>> agreement.rates
    [0.2, 0.4]
    >>> for _ in range(8):
    ...     agreement.observe([False, True])
    >>> [round(rate, 2) for rate in agreement.rates]
    [0.06, 0.83]

    Attributes:
        exits: The layers.
        n_samples: Positions that were judged.
        every: Steps from one judged position to the next.
    """

    exits: tuple[int, ...]
    n_layer: int
    n_samples: int = 0
    every: int = _EVERY
    _tried: list[float] = field(default_factory=list)
    _right: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._tried = [_PRIOR] * len(self.exits)
        self._right = [_PRIOR * 0.5 * (layer + 1) / self.n_layer for layer in self.exits]

    @property
    def rates(self) -> list[float]:
        """P(the exit's token is the text's) of each exit."""
        return [min(_MOST, right / tried) for right, tried in zip(self._right, self._tried, strict=True)]

    def observe(self, right: Sequence[bool]) -> None:
        """Count a judged position; `right` says of each exit whether its token was the text's."""
        self.n_samples += 1
        for i, hit in enumerate(right):
            self._tried[i] = _FORGET * self._tried[i] + 1
            self._right[i] = _FORGET * self._right[i] + hit

    def seen(self, *, pays: bool) -> None:
        """Judge positions less often from now on where no exit pays, more often again where one does."""
        self.every = _EVERY if pays or self.n_samples <= _ALL else min(_SELDOM, 2 * self.every)


def exits_of(n_layer: int) -> tuple[int, ...]:
    """Return the layers that may be exits: at most eight, the last one not among them.

    >>> exits_of(28), exits_of(2)
    ((5, 8, 11, 14, 17, 20, 23, 26), (0,))
    """
    first, last = n_layer // 5, n_layer - 2
    return tuple(sorted({round(layer) for layer in np.linspace(first, max(first, last), EXITS).tolist()}))


class ExitDrafter(OwnLayersDrafter):
    """Implements edgedec.drafter.Drafter.

    Raises:
        CapabilityError: The runtime can't leave out layers of this model, tap them, or go on from hidden states.
    """

    demands = Demands(
        rows=EXITS, costs=True, layers=True, memory=lambda plan: [MemoryTerm("early exits", _PLANNED_BYTES, "judged")]
    )

    def __init__(self, context: DraftContext) -> None:
        card, capabilities = context.target.model.card, context.target.model.capabilities
        for name in ("layers", "taps", "hidden_input"):
            capabilities.require(name, card.runtime)
        super().__init__(context, _DRAWS)
        self._n_layer = card.n_layer
        stored = context.store.get(NAME)
        self._agreement = stored if isinstance(stored, Agreement) else Agreement(exits_of(card.n_layer), card.n_layer)
        context.store[NAME] = self._agreement
        self._layer = self._agreement.exits[0]
        self.traits = self.traits_of(self.share, max(self._agreement.rates))  # the best exit's acceptance
        self.begin([])

    @property
    def needs(self) -> DrafterNeeds:
        """Forwards with layers left out; where the next position is judged, the hidden states after each exit."""
        return DrafterNeeds(taps=self._agreement.exits if self._is_due else (), layers=True, varies=True)

    @property
    def share(self) -> float:
        """About the share of a whole token's weights that the present exit reads."""
        return _share(self._layer, self._n_layer)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Start a text with its prompt; the session holds it when the first draft is requested."""
        super().begin(token_ids)
        self._sample: NDArray[np.float32] | None = None
        self._n_steps = 0
        self._is_due = True  # whether the next position is judged
        self._pays = True  # whether an exit paid when a position was judged last; before the first, it is tried

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Draft with the exit and the length that promise most; nothing where no exit beats plain decoding.

        While drafts are recorded, it drafts `n_max` tokens all the same: what pays is another machine's to say.
        """
        if n_max < 1 or not self.is_ready(deadline_s):
            return EMPTY_DRAFT
        try:
            judged = self._judge()
        except CancelledError:
            return EMPTY_DRAFT
        recorded = self.context.recorder is not None
        if not (judged or self._pays or recorded):
            return EMPTY_DRAFT
        self._layer, n_levels, gain = self._choice(n_max)
        self._pays = gain >= _LEAST_GAIN
        if judged:
            self._agreement.seen(pays=self._pays)
        if not (recorded or self._pays):
            return EMPTY_DRAFT
        layers = LayerSet.of(self._n_layer, range(self._layer + 1))
        return self.draft_with(layers, self.share, n_max, deadline_s, n_levels=n_max if recorded else n_levels)

    def _choice(self, n_max: int) -> tuple[int, int, float]:
        """Return the exit and the length with the most expected tokens per second, and these over plain decoding's."""
        whole = self.context.curve.up_to(n_max + 1, self.n_past)
        choices: list[tuple[float, int, int]] = []
        for layer, rate in zip(self._agreement.exits, self._agreement.rates, strict=True):
            part = DraftPrice(self.parts.ratio(_share(layer, self._n_layer)))
            length, gain = best_length(rate, part, lambda n: whole[n] / whole[0], n_max, 1.0)
            choices.append((gain, -layer, length))
        gain, minus_layer, length = max(choices)
        return -minus_layer, length, gain

    def learn(self, verification: Verification, hidden: Hidden) -> None:
        """Take the tokens that the text got, and now and then keep the hidden states of the last of them."""
        super().learn(verification, hidden)
        self._sample = None
        if self._is_due and all(layer in hidden for layer in self._agreement.exits):
            self._sample = np.stack([hidden[layer][-1] for layer in self._agreement.exits])
        self._n_steps += 1
        n_samples = self._agreement.n_samples + (self._sample is not None)
        self._is_due = n_samples < _ALL or self._n_steps % self._agreement.every == 0

    def _judge(self) -> bool:
        """Give the head the hidden states that were kept, and count which exits have the text's token.

        Returns False where none were kept, or they have no room behind the text.
        """
        sample, self._sample = self._sample, None
        target, n_past = self.context.target, self.n_past
        if sample is None or n_past + len(sample) > target.n_ctx:
            return False
        group = RowGroup(vectors=sample, span=Span(enter=self._n_layer))
        forward = target.evaluate(ForwardItem(target, n_past, (group,), rows="all"))
        if self.context.recorder is not None:
            self.context.recorder.evaluated(len(sample), LayerSet.of(self._n_layer, ()))
        drawn = [self._levels.ranked(forward, row, self.ids[:-1])[0][0] for row in range(len(sample))]
        self._agreement.observe([draft == self.ids[-1] for draft in drawn])
        return True

    def memory_bytes(self) -> int:
        """Return the bytes of the text's tokens, of the counts, and of a position's hidden states."""
        n_bytes = 128 + 4 * self.context.target.model.card.n_embd
        return super().memory_bytes() + len(self._agreement.exits) * n_bytes


def _share(layer: int, n_layer: int) -> float:
    return _HEAD + (1 - _HEAD) * (layer + 1) / n_layer
