"""Exact integration of the rules themselves: over all drafts and over all values of their random numbers.

A random number is handed out as an interval, at first (0, 1). A comparison that splits it makes two cases, each as
probable as its part is long. So what runs is the rule that decodes, and the sum over its cases is no estimate.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.draft import Draft, Verification
from edgedec.sampling import Distribution
from edgedec_methods.drawn.rules import Verify

Law = Callable[[tuple[int, ...]], NDArray[np.float64]]
"""A model: text -> f64[n_vocab], the probabilities of the next token."""

Drawing = tuple[float, Draft, Sequence[Distribution | None]]
"""A draft, its q, and how probable it is that the drafter draws it."""


def sparse(probs: NDArray[np.float64]) -> Distribution:
    """Return a distribution as the rules take it."""
    ids = np.flatnonzero(probs)
    return Distribution(ids, probs[ids])


@dataclass
class Cases:
    """One run's decisions: those to follow, then the first branch of each new one."""

    script: tuple[bool, ...]
    taken: list[bool] = field(default_factory=list)
    weight: float = 1.0

    def split(self, share: float) -> bool:
        """Decide between two cases, of which the first has this share."""
        place = len(self.taken)
        first = self.script[place] if place < len(self.script) else True
        self.taken.append(first)
        self.weight *= share if first else 1 - share
        return first


class Number:
    """A random number of which only an interval is known."""

    def __init__(self, cases: Cases) -> None:
        self.low, self.high, self.cases = 0.0, 1.0, cases

    def __lt__(self, bound: float) -> bool:
        if bound >= self.high or bound <= self.low:
            return bound >= self.high
        below = self.cases.split((bound - self.low) / (self.high - self.low))
        self.low, self.high = (self.low, float(bound)) if below else (float(bound), self.high)
        return below


def outcomes(
    rule: Verify, draft: Draft, q: Sequence[Distribution | None], law: Law
) -> Iterator[tuple[float, Verification]]:
    """Yield what a rule may make of a draft, with probabilities; check which rows of p it asks for."""
    waiting: list[tuple[bool, ...]] = [()]
    while waiting:
        script = waiting.pop()
        cases = Cases(script)
        numbers: dict[int, Any] = {}
        rows: list[int] = []

        def target(row: int, accepted: tuple[int, ...], rows: list[int] = rows) -> Distribution:
            assert accepted == text_of(draft, row - 1), "the row belongs to another text"
            assert row not in rows, "the row was asked for before"
            rows.append(row)
            return sparse(law(accepted))

        def uniform(k: int, cases: Cases = cases, numbers: dict[int, Any] = numbers) -> Any:
            assert k == len(numbers), "each number is used once, in order"
            return numbers.setdefault(k, Number(cases))

        verification = rule(draft, q, target, uniform)
        yield cases.weight, verification
        fresh = range(len(script), len(cases.taken))
        waiting += [(*cases.taken[:place], False) for place in fresh]


def text_of(draft: Draft, node: int) -> tuple[int, ...]:
    """Return the tokens from the root to a node."""
    if node < 0:
        return ()
    return (*text_of(draft, int(draft.parents[node])), int(draft.tokens[node]))


def joint_of(law: Law, n_vocab: int, length: int) -> NDArray[np.float64]:
    """Return f64[n_vocab, ...], the probability of every text of this length."""
    joint = np.zeros((n_vocab,) * length)
    for text in itertools.product(range(n_vocab), repeat=length):
        joint[text] = np.prod([law(text[:i])[text[i]] for i in range(length)])
    return joint


@dataclass
class Result:
    """What a rule does over all drafts: the law of the text it leads to, and how many tokens it accepts on average."""

    joint: NDArray[np.float64]
    n_accepted: float


def integrate(rule: Verify, drawings: Sequence[Drawing], law: Law, n_vocab: int, length: int) -> Result:
    """Sum over every draft and every case; a text that ends early goes on as the target says."""
    truth, result = joint_of(law, n_vocab, length), Result(np.zeros((n_vocab,) * length), 0.0)
    assert abs(sum(weight for weight, _, _ in drawings) - 1) < 1e-12
    for drawn, draft, q in drawings:
        for weight, verification in outcomes(rule, draft, q, law):
            text, path = verification.token_ids, verification.path
            assert text[:-1] == tuple(draft.tokens[node] for node in path)
            assert [int(draft.parents[node]) for node in path] == [-1, *path][: len(path)]
            assert truth[text].sum() > 0, "a text that the target rules out"
            result.joint[text] += drawn * weight * truth[text] / truth[text].sum()
            result.n_accepted += drawn * weight * len(path)
    return result


def random_law(rng: np.random.Generator, n_vocab: int, length: int, spread: float = 0.7) -> Law:
    """Return a model whose every conditional distribution is drawn at random."""
    table: Mapping[tuple[int, ...], NDArray[np.float64]] = {
        text: rng.dirichlet(np.full(n_vocab, spread))
        for n in range(length + 1)
        for text in itertools.product(range(n_vocab), repeat=n)
    }
    return table.__getitem__


def mixed_law(first: Law, second: Law, share: float) -> Law:
    """Return the mixture of two models."""
    return lambda text: (1 - share) * first(text) + share * second(text)


def paths(q: Law, n_vocab: int, depth: int, k: int) -> list[Drawing]:
    """Return all draws of k independent paths, side by side; a chain for one."""
    one = [(float(p), text) for text, p in np.ndenumerate(joint_of(q, n_vocab, depth))]
    drawings: list[Drawing] = []
    for chosen in itertools.product(one, repeat=k):
        tokens = [token for _, text in chosen for token in text]
        parents = [-1 if i % depth == 0 else i - 1 for i in range(k * depth)]
        laws = [sparse(q(text[:i])) for _, text in chosen for i in range(depth)]
        weight = float(np.prod([p for p, _ in chosen]))
        if weight > 0:
            drawings.append((weight, Draft.tree(tokens, parents, [1.0] * len(tokens)), laws))
    return drawings


def trees(q: Law, branching: Sequence[int]) -> list[Drawing]:
    """Return all draws of a tree whose nodes of each depth have so many children, drawn without replacement."""
    grown: list[tuple[float, list[int], list[int], list[Distribution | None]]] = [(1.0, [], [], [])]
    level = [-1]
    for n_children in branching:
        for parent in level:
            grown = [
                (weight * p, tokens + list(chosen), parents + [parent] * n_children, laws + [law] * n_children)
                for weight, tokens, parents, laws in grown
                for law in [sparse(q(_text(tokens, parents, parent)))]
                for p, chosen in _without_replacement(law, n_children)
            ]
        level = list(range(len(grown[0][1]) - len(level) * n_children, len(grown[0][1])))
    return [(weight, Draft.tree(tokens, parents, [1.0] * len(tokens)), laws) for weight, tokens, parents, laws in grown]


def _text(tokens: list[int], parents: list[int], node: int) -> tuple[int, ...]:
    return () if node < 0 else (*_text(tokens, parents, parents[node]), tokens[node])


def _without_replacement(law: Distribution, n: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    probs = dict(zip(law.token_ids.tolist(), law.probs.tolist(), strict=True))
    for chosen in itertools.permutations(probs, n):
        weight, left = 1.0, 1.0
        for token in chosen:
            weight *= probs[token] / left
            left -= probs[token]
        yield weight, chosen
