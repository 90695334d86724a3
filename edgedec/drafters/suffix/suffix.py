"""suffix: what followed the longest earlier occurrence of the text's end, in this text or in earlier ones.

Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) and prompt lookup (Saxena 2023), on suffix automata: the longest
match costs nothing to find, and continuations are ranked by how often they followed. Lossless: it only proposes.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import STORE_BYTES, Draft, DraftContext, DrafterNeeds, Verification, store_limit
from edgedec.drafters.suffix.automaton import STATE_BYTES, SuffixAutomaton
from edgedec.drafters.suffix.matching import Match, MatchRates, expected, grow

MOST_TOKENS = STORE_BYTES // STATE_BYTES  # that a store ever holds
_MAX_PROMPT = 32_768  # last tokens of a prompt that are looked at

Text: TypeAlias = "array[int]"  # token ids, four bytes each


@dataclass(slots=True)
class SuffixStore:
    """What outlives a request.

    Attributes:
        young: Texts of the latest requests.
        old: Those before; dropped when `young` is full and takes its place.
        outputs, old_outputs: The token ids of the requests among them whose texts no file holds yet, oldest first.
        rates: How often a match was right, by its length.
        shut: Whether no more texts are taken.
    """

    young: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    old: SuffixAutomaton = field(default_factory=SuffixAutomaton)
    outputs: list[Text] = field(default_factory=list)
    old_outputs: list[Text] = field(default_factory=list)
    rates: MatchRates = field(default_factory=MatchRates)
    shut: bool = False

    def begin(self, limit_bytes: int) -> None:
        """Begin a text, which does not follow the one before; `limit_bytes` is the most that all of them may take."""
        if self.young.memory_bytes() > limit_bytes // 2:
            self.old, self.young = self.young, SuffixAutomaton()
            self.old_outputs, self.outputs = self.outputs, []
        self.young.last = 0

    def take_outputs(self) -> list[Text]:
        """Return the texts that no file holds yet, oldest first, for a file to hold them."""
        taken = [output for output in (*self.old_outputs, *self.outputs) if output]
        self.old_outputs, self.outputs = [], []
        return taken

    def shed(self) -> None:
        """Drop all texts, but for the token ids that a file has still to take, and take no more of them."""
        self.young, self.old, self.shut = SuffixAutomaton(), SuffixAutomaton(), True

    def memory_bytes(self) -> int:
        """Return about how much memory it holds."""
        return self.young.memory_bytes() + self.old.memory_bytes()


class SuffixDrafter:
    """Implements edgedec.draft.Drafter."""

    def __init__(self, context: DraftContext) -> None:
        store = context.store.setdefault("suffix", SuffixStore())
        assert isinstance(store, SuffixStore), "the store's entry of this name is ours"
        self._store = store
        self._limit = store_limit(context.budget_bytes)
        self._text = SuffixAutomaton()
        self._output: Text = array("i")
        self._earlier: list[Match] = []
        self._expected: tuple[int, int] | None = None  # bucket and most frequent continuation of the last match

    @property
    def needs(self) -> DrafterNeeds:
        """Nothing."""
        return DrafterNeeds()

    def begin(self, token_ids: Sequence[int]) -> None:
        """Take the prompt."""
        self._store.begin(self._limit)
        self._output = array("i")
        self._store.outputs.append(self._output)
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
        if self._store.shut:
            self._earlier.clear()
        for token in verification.token_ids:
            if self._expected is not None:
                bucket, best = self._expected
                self._store.rates.observe(bucket, token == best)
            self._take(token)
            if not self._store.shut:
                self._store.young.add(token)
                self._output.append(token)
            self._expected = expected(self._longest())

    def _longest(self) -> Match:
        state = self._text.link[self._text.last] if self._text.last else 0
        own = Match(self._text, state, self._text.length[state])
        return max([own, *self._earlier], key=lambda match: match.length)

    def memory_bytes(self) -> int:
        """Return about how much memory it and its store hold."""
        return self._text.memory_bytes() + self._store.memory_bytes()
