"""recycling: what the target held probable after each token when it last saw it.

Token Recycling (Luo et al. 2024, arXiv:2408.08696). Every row that a step evaluates, accepted or not, leaves its most
probable next tokens behind. Lossless: it only proposes. Where a CPU wants it otherwise than the paper:

- The tree is no template of 80 nodes: it grows along the most probable paths, by the probabilities kept beside the ids.
- The rows of the accepted path are written last: of a token met twice in a step the text's own row stays.
- The prompt fills in the tokens never evaluated with what followed them in it. A target that tells no candidates
  teaches the tokens of the text instead.
- Above temperature 0 children are ranked with the noise that the target draws with.
"""

from edgedec.draft import DraftContext
from edgedec.drafters.ngram.base import NgramDrafter
from edgedec.drafters.ngram.tree_growth import Child, Ranking

_KNOWN = 0.65
_ERROR = 2.0


class RecyclingDrafter(NgramDrafter):
    """Implements edgedec.draft.Drafter.

    The table outlives the request, within 32 MB and half of the budget; when it is full, the token that was met first
    makes room.
    """

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context, "recycling", (1,), least_rate=1.0)
        self._ranking = Ranking(context.sampling, context.noise, error=_ERROR, known=_KNOWN)

    def _children(self, state: int, depth: int) -> list[Child]:
        _, ids, probs = self._text.longest(state)
        return self._ranking.rank(ids, probs, self._text.length + depth)
