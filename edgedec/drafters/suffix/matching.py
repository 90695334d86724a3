"""The longest earlier occurrence of a text's end, and the draft that follows from it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import islice

from edgedec.draft import EMPTY_DRAFT, Draft
from edgedec.drafters.suffix.automaton import SuffixAutomaton

_CHILDREN = 3
_LEAST_PATH = 0.01
_LOOKED_AT = 64  # continuations of a context, those first seen: more are as good as none, and take time
# How often the most frequent continuation of a match of 1, 2, 3 to 4, 5 to 8, ... tokens comes, before any is seen.
_PRIOR = (0.15, 0.3, 0.45, 0.6, 0.75, 0.85, 0.9)
_PRIOR_WEIGHT = 12.0
_MEMORY = 400  # observations after which old ones count half


@dataclass(slots=True)
class Match:
    """The longest context at the text's end that an automaton knows from before."""

    automaton: SuffixAutomaton
    state: int = 0
    length: int = 0

    def follow(self, token: int) -> None:
        """Go on behind a token."""
        self.state, self.length = self.automaton.follow(self.state, self.length, token)


@dataclass(slots=True)
class MatchRates:
    """How often the most frequent continuation of a match came, by the match's length in doubling buckets."""

    hits: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT * p for p in _PRIOR])
    trials: list[float] = field(default_factory=lambda: [_PRIOR_WEIGHT] * len(_PRIOR))

    def observe(self, bucket: int, right: bool) -> None:
        """Take what became of a continuation."""
        self.hits[bucket] += right
        self.trials[bucket] += 1
        if self.trials[bucket] > _MEMORY:
            self.hits[bucket] *= 0.5
            self.trials[bucket] *= 0.5

    def known(self) -> list[float]:
        """Return the rates by bucket."""
        return [hits / trials for hits, trials in zip(self.hits, self.trials, strict=True)]


def expected(match: Match) -> tuple[int, int] | None:
    """Return the bucket and the most frequent continuation of a match, None where there is none."""
    children = match.automaton.next[match.state]
    if match.length == 0 or not children:
        return None
    return _bucket(match.length), _ranked(children, match.automaton.count)[0][1]


def grow(match: Match, known: Sequence[float], n_max: int) -> Draft:
    """Follow a match, most probable continuations first, in at most `n_max` nodes."""
    if match.length == 0 or n_max < 1:
        return EMPTY_DRAFT
    following, counts = match.automaton.next, match.automaton.count
    tokens: list[int] = []
    parents: list[int] = []
    p_accept: list[float] = []
    # (minus the path's probability, order of arrival, token, p, parent, its state, its context's length)
    queue: list[tuple[float, int, int, float, int, int, int]] = []
    state, length, parent, path, order = match.state, match.length, -1, 1.0, 0
    while len(tokens) < n_max:
        if following[state]:
            chance = known[_BUCKETS[length] if length < len(_BUCKETS) else -1]
            for share, token, target in _ranked(following[state], counts):
                p = chance * share
                if path * p < _LEAST_PATH:
                    break
                order += 1
                heappush(queue, (-path * p, order, token, p, parent, target, length + 1))
        if not queue:
            break
        negative, _, token, p, above, state, length = heappop(queue)
        parent, path = len(tokens), -negative
        tokens.append(token)
        parents.append(above)
        p_accept.append(p)
    return Draft.tree(tokens, parents, p_accept)


def _ranked(following: Mapping[int, int], counts: Sequence[int]) -> list[tuple[float, int, int]]:
    """Return the most frequent continuations: share, token, state, most frequent first."""
    if len(following) == 1:
        return [(1.0, *item) for item in following.items()]
    found = [(counts[target] or 1, token, target) for token, target in islice(following.items(), _LOOKED_AT)]
    total = sum([count for count, _, _ in found])
    found.sort(reverse=True)
    return [(count / total, token, target) for count, token, target in found[:_CHILDREN]]


def _bucket(length: int) -> int:
    return min((length - 1).bit_length(), len(_PRIOR) - 1)


_BUCKETS = [0, *map(_bucket, range(1, 64))]
