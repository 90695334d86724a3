"""skip: the target without some of its half-layers drafts, in its own session.

SWIFT (Xia et al. 2024, arXiv:2410.06161): attention and feed-forward blocks are left out apart, and which ones is
searched for, not trained. Here the search is made before (`edgedec tune-skip`, edgedec.layer_skip.search) and kept
on the disk; without it every fourth layer is left out. A chain goes on while it is likely enough for one more token to
be worth a forward, where SWIFT stops below a top-1 probability of 0.8.
"""

from collections.abc import Callable, Sequence

from edgedec.cost_curve import CostCurve
from edgedec.draft import Draft, DraftContext, DrafterNeeds, Verification
from edgedec.drafters.self_speculation.self_draft import Hidden, OwnLayers
from edgedec.layer_skip.layer_sets import TunedSet, evenly_spaced, left_out

_LEFT_OUT = 4  # one layer of so many, where no set was tuned
_EXPECTED = 0.7  # acceptance then
_DRAWS = 0x536B697044726177  # sets the numbers that it draws with apart


class SkipDrafter:
    """Implements edgedec.draft.Drafter and edgedec.drafters.self_speculation.self_draft.SelfDrafter.

    Args:
        context: The generation's.
        tuned: The set of half-layers; None for evenly spaced layers.

    Raises:
        CapabilityError: The runtime can't leave out layers of this model.
    """

    def __init__(self, context: DraftContext, tuned: TunedSet | None = None) -> None:
        card, capabilities = context.target.model.card, context.target.model.capabilities
        capabilities.require("layers", card.runtime)
        self._own = OwnLayers(context, _DRAWS)
        self._layers = evenly_spaced(card.n_layer, card.n_layer // _LEFT_OUT) if tuned is None else tuned.layers
        self._share = 1 - len(left_out(self._layers)) / (2 * card.n_layer) if tuned is None else tuned.share
        self._cost = self._share if tuned is None else tuned.cost
        self._expected = _EXPECTED if tuned is None else tuned.agreement

    @property
    def needs(self) -> DrafterNeeds:
        """Forwards with layers left out."""
        return DrafterNeeds(layers=True)

    @property
    def share(self) -> float:
        """Of a whole token's weights that one of its tokens reads."""
        return self._share

    @property
    def expected(self) -> float:
        """The agreement found when the set was tuned."""
        return self._expected

    def learn_costs(self, curve: CostCurve, corrected: Callable[[float], float]) -> None:
        """Take the engine's curve, which takes what was measured when the set was tuned."""
        curve.expect_part(self._share, self._cost)
        self._own.curve, self._own.corrected = curve, corrected

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt; the session will hold it when the first draft is asked for."""
        self._own.begin(token_ids)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Draft a chain of what it would draw, and leaves beside it."""
        return self._own.draft(self._layers, self._share, n_max, deadline_s)

    def accept(self, verification: Verification, hidden: Hidden) -> None:
        """Take the tokens that the text got."""
        self._own.accept(verification)

    def memory_bytes(self) -> int:
        """Return the bytes of its own lists; the KV cache is the target's."""
        return self._own.memory_bytes()
