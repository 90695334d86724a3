"""SWIFT: the target without some of its half-layers drafts, in its own session.

Attention and feed-forward blocks are left out independently, and a search finds which ones; nothing is trained. Here
the search is made before (`edgedec tune-skip`) and its result kept on the disk; without one, every fourth layer is left
out. A chain goes on while one more token is likely enough to be worth a forward, where SWIFT stops below a top-1
probability of 0.8. Where a set was tuned and promises to pay, `auto` takes this drafter.

Paper: Xia et al. 2024, arXiv:2410.06161; Draft & Verify, Zhang et al. 2023, arXiv:2309.08168
Option: `--draft skip`, after `edgedec tune-skip MODEL`
For: large models without a draft model or a head
Measured: 1.03 times as fast on qwen2.5-coder-1.5b (`speed/layer_skip`, program at 832b325c)
Status: opt-in
"""

from pathlib import Path

from edgedec.draft import Draft
from edgedec.drafter import DraftContext, DrafterNeeds
from edgedec.drafter_traits import Demands
from edgedec.model import Model
from edgedec.scheduler.drafter_factories import PromisedGain
from edgedec_methods.self_draft import OwnLayersDrafter
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, evenly_spaced, left_out, tuned_set

_LEFT_OUT = 4  # one layer of so many is left out where no set was tuned
_EXPECTED = 0.7  # the acceptance that is expected then
_DRAWS = 0x536B697044726177  # sets the drawn numbers apart from those of other drafters


def promised(model: Model, cache_dir: Path | None) -> PromisedGain | None:
    """Return what drafts with the set that was tuned for a model promise; None without a set, or without its use."""
    tuned = tuned_set(cache_dir, model.card) if model.capabilities.layers else None
    return None if tuned is None else tuned.promised_gain


class SkipDrafter(OwnLayersDrafter):
    """Implements edgedec.drafter.Drafter; the context's curve takes what was measured when the set was tuned.

    Args:
        context: The generation's.
        tuned: The set of half-layers; None for the one that is kept for the model or, without one, for evenly spaced
            layers.

    Attributes:
        share: The share of a whole token's weights that a drafted token reads.
        traits: What the drafter declares: the acceptance that is expected is the agreement found by tuning.

    Raises:
        CapabilityError: The runtime can't leave out layers of this model.
    """

    needs = DrafterNeeds(layers=True)
    demands = Demands(layers=True)

    def __init__(self, context: DraftContext, tuned: TunedSet | None = None) -> None:
        card, capabilities = context.target.model.card, context.target.model.capabilities
        capabilities.require("layers", card.runtime)
        super().__init__(context, _DRAWS)
        if tuned is None:
            tuned = tuned_set(context.store.cache_dir, card)
        if tuned is None:
            context.note("skip leaves out every fourth layer; edgedec tune-skip finds a better set for this model")
            layers = evenly_spaced(card.n_layer, card.n_layer // _LEFT_OUT)
            share = 1 - len(left_out(layers)) / (2 * card.n_layer)
            tuned = TunedSet(layers, share, share, _EXPECTED, 0)
        self._layers, self.share = tuned.layers, tuned.share
        self.parts.expect(tuned.share, tuned.cost)
        self.traits = self.traits_of(tuned.share, tuned.agreement)

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Draft a chain of the tokens that the part of the target would draw, and leaves beside it."""
        return self.draft_with(self._layers, self.share, n_max, deadline_s)
