"""common: what mostly follows the text's last tokens in a small text of everyday answers and code.

It knows something before the text itself has taught the other drafters anything, as ADED's table does that starts from
a corpus (Liu et al. 2024). Lossless: it only proposes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, DraftContext, DrafterNeeds, Verification
from edgedec.drafters.suffix.automaton import SuffixAutomaton
from edgedec.drafters.suffix.matching import Match, MatchRates, expected, grow

_LAST = 32  # tokens of a prompt that decide where the text stands


class CommonDrafter:
    """Implements edgedec.draft.Drafter."""

    def __init__(self, context: DraftContext) -> None:
        rates = context.store.setdefault("common", MatchRates())
        assert isinstance(rates, MatchRates), "the store's entry of this name is ours"
        self._rates = rates
        self._match = Match(SuffixAutomaton() if context.common is None else context.common.automaton)
        self._expected: tuple[int, int] | None = None

    @property
    def needs(self) -> DrafterNeeds:
        """Nothing."""
        return DrafterNeeds()

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        for token in token_ids[-_LAST:]:
            self._match.follow(token)
        self._expected = expected(self._match)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Follow the longest match, most probable continuations first."""
        return grow(self._match, self._rates.known(), n_max)

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        for token in verification.token_ids:
            if self._expected is not None:
                bucket, best = self._expected
                self._rates.observe(bucket, token == best)
            self._match.follow(token)
            self._expected = expected(self._match)

    def memory_bytes(self) -> int:
        """Return about how much memory the text takes; all generations share it."""
        return self._match.automaton.memory_bytes()
