"""The longest earlier occurrence of a text's end, the draft that follows from it, and drafts from a fixed text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.drafter import DraftContext, DrafterNeeds
from edgedec.drafters.draft_builder import Child, grow_tree
from edgedec.drafters.suffix.automaton import SuffixAutomaton

_CHILDREN = 3
LEAST_PATH = 0.01
_LOOKED_AT = 64  # continuations of a context, those first seen: the others would take time and hardly change the draft
# How often the most frequent continuation of a match of 1, 2, 3 to 4, 5 to 8, ... tokens comes, before any is seen.
_PRIOR = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.9)
_PRIOR_WEIGHT = 12.0
_MOST_BITS = 32  # of the length of a match
_MEMORY = 400  # observations after which older ones count half


class Matching(Protocol):
    """A context at the text's end that is known from before; it follows the text, token by token."""

    @property
    def length(self) -> int:
        """Tokens of the context."""

    def follow(self, token: int) -> None:
        """Take the text's next token."""

    def best(self) -> int | None:
        """Return the most frequent continuation of the context; None without a context."""

    def draft(self, rates: "MatchRates", n_max: int) -> Draft:
        """Return a tree of at most `n_max` nodes, most probable paths first."""


@dataclass(slots=True)
class Match:
    """The longest context at the text's end that an automaton knows from before.

    Attributes:
        automaton: What is known.
        state: The automaton's state of the context.
        length: Tokens of the context.
    """

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    def follow(self, token: int) -> None:
        """Move on to the longest context that ends with this token."""
        automaton, state, length = self.automaton, self.state, self.length
        target = automaton.next[state].get(token)
        while target is None and state > 0:
            state = automaton.link[state]
            length, target = automaton.length[state], automaton.next[state].get(token)
        self.state, self.length = (0, 0) if target is None else (target, length + 1)

    def best(self) -> int | None:
        """Return the most frequent continuation of the context; None without a context."""
        following = self.automaton.next[self.state]
        return _ranked(following, self.automaton.count)[0][0][1] if self.length and following else None

    def draft(self, rates: "MatchRates", n_max: int) -> Draft:
        """Return a tree of at most `n_max` nodes: what followed the context, most probable paths first."""
        if not self.length:
            return EMPTY_DRAFT
        following, counts, chances, length = self.automaton.next, self.automaton.count, rates.values(), self.length

        def children(state: int, depth: int) -> list[Child[int]]:
            children: list[Child[int]] = []
            if following[state]:
                rate, (ranked, total) = chances[(length + depth - 1).bit_length()], _ranked(following[state], counts)
                for count, token in ranked:
                    p = rate * (count / total)
                    if p >= LEAST_PATH:
                        children.append((p, token, p, following[state][token]))
            return children

        return grow_tree(self.state, children, n_max=n_max, least_path=LEAST_PATH, older_first=True)


@dataclass(slots=True)
class MatchRates:
    """How often the most frequent continuation of a match came, by the match's length in doubling buckets."""

    hits: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT * p for p in _PRIOR])
    trials: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT] * len(_PRIOR))

    def observe(self, match: Matching, token: int) -> None:
        """Count whether the token that the text got is the most frequent continuation of the match before it."""
        best = match.best()
        if best is None:
            return
        bucket = min((match.length - 1).bit_length(), len(_PRIOR) - 1)
        self.hits[bucket] += token == best
        self.trials[bucket] += 1
        if self.trials[bucket] > _MEMORY:
            self.hits[bucket] *= 0.5
            self.trials[bucket] *= 0.5

    def values(self) -> list[float]:
        """Return the rate of a match by the bits that its length less one has."""
        rates = [hits / trials for hits, trials in zip(self.hits, self.trials, strict=True)]
        return rates + rates[-1:] * _MOST_BITS


def _ranked(following: Mapping[int, int], counts: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """Return up to three continuations of a state, most frequent first: the count of each, its token; all counts."""
    ranked: list[tuple[int, int]] = []
    total = 0
    for token, target in islice(following.items(), _LOOKED_AT):
        count = counts[target] or 1
        total += count
        ranked.append((count, token))
    ranked.sort(reverse=True)
    return ranked[:_CHILDREN], total


class FixedTextDrafter:
    """Implements edgedec.drafter.Drafter but for memory_bytes()."""

    needs = DrafterNeeds()

    def __init__(self, name: str, context: DraftContext, match: Matching, n_last: int) -> None:
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
