"""stand: n-grams with the target's probabilities, from which children are drawn rather than taken.

STAND (Song et al. 2025, arXiv:2506.04708): contexts of up to three tokens, the longest known one counts, its children
are the top of the perturbed log-probabilities. Lossless: it only proposes. Where a CPU, or the way edgedec draws, wants
it otherwise than the paper:

- The noise is the target's own at that position (drafter-invariant coupling, Daliri, Musco and Suresh 2024,
  arXiv:2408.07978), not made beforehand: the draw tends to be the target's, and no rejection rule needs q.
- The tree is no template found on a warm-up set: it grows along the most probable paths of the moment.
- The average forgets: a new row weighs at least 0.3, which accepted more than the plain average.
- The prompt fills in the contexts that are missing.
"""

from edgedec.draft import DraftContext
from edgedec.drafters.ngram.base import NgramDrafter
from edgedec.drafters.ngram.tree_growth import Child, Ranking

_LEAST_RATE = 0.3


class StandDrafter(NgramDrafter):
    """Implements edgedec.draft.Drafter.

    The table outlives the request (samples of one prompt share it), within 32 MB and half of the budget; when it is
    full, the context that was met first makes room.
    """

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context, "stand", (3, 2, 1), _LEAST_RATE)
        sampling, noise = context.sampling, context.noise
        self._rankings = {
            3: Ranking(sampling, noise, error=1.0, known=0.9),
            2: Ranking(sampling, noise, error=1.5, known=0.8),
            1: Ranking(sampling, noise, error=2.0, known=0.65),
        }

    def _children(self, state: int, depth: int) -> list[Child]:
        order, ids, probs = self._text.longest(state)
        return self._rankings[order].rank(ids, probs, self._text.length + depth) if order else []
