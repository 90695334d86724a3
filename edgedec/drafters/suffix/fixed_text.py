"""Drafts from a fixed text: what followed there after the longest match with the text's end."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds
from edgedec.drafters.suffix.matching import Matching, MatchRates


class Followed(Matching, Protocol):
    """A context that follows the text, token by token."""

    def follow(self, token: int) -> None:
        """Take the text's next token."""

    def draft(self, rates: MatchRates, n_max: int) -> Draft:
        """Return a tree of at most `n_max` nodes, most probable paths first."""


class FixedTextDrafter:
    """Implements edgedec.drafter.Drafter but for memory_bytes()."""

    needs = DrafterNeeds()

    def __init__(self, name: str, context: DraftContext, match: Followed, n_last: int) -> None:
        """Draft from the text of `match`; `n_last` tokens of a prompt decide where the text stands."""
        rates = context.store.setdefault(name, MatchRates())
        assert isinstance(rates, MatchRates), "the store's entry of this name is ours"
        self._rates = rates
        self._match = match
        self._n_last = n_last
        self._unread: list[int] = []  # the text's last tokens, as far as they are not followed yet
        self._drafted = False  # since the last learn()

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self._unread = list(token_ids[-self._n_last :])

    def propose(self, n_max: int, deadline_s: float) -> Draft:
        """Return a tree of at most `n_max` nodes: what followed the longest match, most probable paths first."""
        for token in self._unread:
            self._match.follow(token)
        self._unread, self._drafted = [], True
        return self._match.draft(self._rates, n_max)

    def learn(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Follow the text by the tokens that it got; where no draft was asked for, once the next one is."""
        if not self._drafted:
            self._unread = [*self._unread, *verification.token_ids][-self._n_last :]
            return
        self._drafted = False
        for token in verification.token_ids:
            self._rates.observe(self._match, token)
            self._match.follow(token)
