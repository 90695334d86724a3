"""suffix: what followed the longest earlier occurrence of the text's end, in this text or in earlier ones.

Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) and prompt lookup (Saxena 2023), on suffix automata: the longest
match costs nothing to find, and continuations are ranked by how often they followed. Lossless: it only proposes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, DraftContext, DrafterNeeds, Verification
from edgedec.drafters.matching import Match, MatchRates, expected, grow
from edgedec.drafters.suffix_automaton import SuffixAutomaton

_STORE_BYTES = 32_000_000  # of earlier texts, where the context names no budget
_MAX_PROMPT = 32_768  # last tokens of a prompt that are looked at


@dataclass(slots=True)
class SuffixStore:
    """What outlives a request.

    Attributes:
        young: Texts of the latest requests.
        old: Those before; dropped when `young` is full and takes its place.
        rates: How often a match was right, by its length.
    """

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    rates: MatchRates = field(default_factory=MatchRates)

    def memory_bytes(self) -> int:
        """Return about how much memory it holds."""
        return self.young.memory_bytes() + self.old.memory_bytes()


class SuffixDrafter:
    """Implements edgedec.draft.Drafter."""

    def __init__(self, context: DraftContext) -> None:
        store = context.store.setdefault("suffix", SuffixStore())
        assert isinstance(store, SuffixStore), "the store's entry of this name is ours"
        self._store = store
        budget = 2 * _STORE_BYTES if context.budget_bytes is None else context.budget_bytes
        self._limit = min(_STORE_BYTES, budget // 2)
        self._text = SuffixAutomaton()
        self._earlier: list[Match] = []
        self._expected: tuple[int, int] | None = None  # bucket and most frequent continuation of the last match

    @property
    def needs(self) -> DrafterNeeds:
        """Nothing."""
        return DrafterNeeds()

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        if self._store.young.memory_bytes() > self._limit // 2:
            self._store.old, self._store.young = self._store.young, SuffixAutomaton()
        self._store.young.last = 0  # the next text does not follow the one before
        self._earlier = [Match(a) for a in (self._store.young, self._store.old) if len(a.next) > 1]
        for token in token_ids[-_MAX_PROMPT:]:
            self._take(token)
        self._expected = expected(self._longest())

    def _take(self, token: int) -> None:
        """Add a token to the text; one that fills its half of the memory begins anew."""
        if self._text.memory_bytes() > self._limit:
            self._text = SuffixAutomaton()
        self._text.add(token)
        for match in self._earlier:
            match.follow(token)

    def draft(self, n_max: int, deadline_s: float) -> Draft:
        """Follow the longest match, most probable continuations first."""
        return grow(self._longest(), self._store.rates.known(), n_max)

    def accept(self, verification: Verification, hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Take the tokens that the text got."""
        for token in verification.token_ids:
            if self._expected is not None:
                bucket, best = self._expected
                self._store.rates.observe(bucket, token == best)
            self._take(token)
            self._store.young.add(token)
            self._expected = expected(self._longest())

    def _longest(self) -> Match:
        state = self._text.link[self._text.last] if self._text.last else 0
        own = Match(self._text, state, self._text.length[state])
        return max([own, *self._earlier], key=lambda match: match.length)

    def memory_bytes(self) -> int:
        """Return about how much memory it and its store hold."""
        return self._text.memory_bytes() + self._store.memory_bytes()
