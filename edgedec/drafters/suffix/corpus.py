"""common: what mostly follows the text's last tokens in a small text of everyday answers and code.

The drafter can propose before the text itself has taught the other drafters anything, as ADED's table can, which starts
from a corpus (Liu et al. 2024). Lossless, as it only proposes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, DraftContext, DrafterNeeds, Verification
from edgedec.drafters.suffix.automaton import SuffixAutomaton
from edgedec.drafters.suffix.matching import Match, MatchRates

_LAST = 32  # tokens of a prompt that decide where the text stands


class CommonDrafter:
    """Implements edgedec.draft.Drafter."""

    needs = DrafterNeeds()

    def __init__(self, context: DraftContext) -> None:
        rates = context.store.setdefault("common", MatchRates())
        assert isinstance(rates, MatchRates), "the store's entry of this name is ours"
        self._rates = rates
        self._match = Match(SuffixAutomaton() if context.common is None else context.common.automaton)

    def begin(self, token_ids: Sequence[int]) -> None:
        """Find the end of the prompt in the small text."""
        for token in token_ids[-_LAST:]:
            self._match.follow(token)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Return a tree of at most `n_max` nodes: what followed the longest match, most probable paths first."""
        return self._match.draft(self._rates, n_max)

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Follow the text by the tokens that it got."""
        for token in verification.token_ids:
            self._rates.observe(self._match, token)
            self._match.follow(token)

    def memory_bytes(self) -> int:
        """Return about how much memory the small text takes, which all generations share."""
        return self._match.automaton.memory_bytes()
