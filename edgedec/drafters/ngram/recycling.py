"""recycling: the tokens that the target held probable after a token when it last evaluated that token.

Token Recycling (Luo et al. 2024, arXiv:2408.08696): every row that a step evaluates, accepted or not, leaves its most
probable next tokens in a table. Lossless, as it only proposes. It differs from the paper, for the sake of a CPU:

- The tree has no fixed template of 80 nodes: it grows along the most probable paths, by the probabilities that the
  table keeps beside the ids.
- The rows of the accepted path are written last, so that of a token evaluated twice in a step the text's own row stays.
- The prompt fills in tokens that were never evaluated with the tokens that followed them in the prompt. Where
  the target gives no candidates, the tokens of the text are learned instead.
- Above temperature 0 children are ranked with the noise that the target draws with.
"""

from edgedec.drafter import DraftContext
from edgedec.drafters.ngram.base import NgramDrafter
from edgedec.drafters.ngram.ranking import Ranking


class RecyclingDrafter(NgramDrafter):
    """Implements edgedec.drafter.Drafter with contexts of one token; a newer row of a context replaces the old one."""

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context, "recycling", {1: Ranking(context, error=2.0, known=0.65)}, least_rate=1.0)
