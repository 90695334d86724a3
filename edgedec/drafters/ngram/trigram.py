"""trigram: a table of trigrams that adapts to the target, searched with a bonus for what is little known.

ADED (Liu et al. 2024, arXiv:2407.12021). Lossless: it only proposes. Where a CPU wants it otherwise than the paper:

- No search of a hundred simulations, which would cost as much as a small target's forward. The tree grows best first,
  and the search's rule, p (1 + c sqrt(N) / (1 + n)), scores each child once: N is how often the context was learnt, n
  how often the child's own. It moves few nodes, to where an evaluated row teaches most. `p_accept` is p without it.
- No corpus to start from. A pair of tokens never seen falls back to the last one, and the prompt fills in what is
  missing.
- A new row weighs at least a half: the table follows the text.
- Above temperature 0 children are ranked with the noise that the target draws with.
"""

import math

from edgedec.draft import DraftContext
from edgedec.drafters.ngram.base import NgramDrafter
from edgedec.drafters.ngram.table import BITS, context_key
from edgedec.drafters.ngram.tree_growth import Child, Ranking

_EXPLORATION = 0.1  # c
_MOST_VISITS = 100  # of a context in the rule, so that the bonus at most doubles a score
_LEAST_RATE = 0.5


class TrigramDrafter(NgramDrafter):
    """Implements edgedec.draft.Drafter.

    The table outlives the request, within 32 MB and half of the budget; when it is full, the context that was met
    first makes room.
    """

    def __init__(self, context: DraftContext) -> None:
        super().__init__(context, "trigram", (2, 1), _LEAST_RATE)
        sampling, noise = context.sampling, context.noise
        self._rankings = {
            2: Ranking(sampling, noise, error=1.5, known=0.8),
            1: Ranking(sampling, noise, error=2.0, known=0.65),
        }

    def _children(self, state: int, depth: int) -> list[Child]:
        order, ids, probs = self._text.longest(state)
        if not order:
            return []
        children = self._rankings[order].rank(ids, probs, self._text.length + depth)
        visits = self._text.table.visits
        bonus = _EXPLORATION * math.sqrt(min(visits(context_key(state, order)), _MOST_VISITS))
        scored = [
            (min(1.0, p * (1 + bonus / (1 + visits(context_key((state << BITS) | token, 2))))), token, p)
            for _, token, p in children
        ]
        scored.sort(key=lambda child: -child[0])
        return scored
