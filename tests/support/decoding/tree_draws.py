"""Every tree that a shape may draw from a tiny model's distributions, with its probability."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import TypeVar

import numpy as np

from edgedec.draft import Draft
from edgedec.sampling import Distribution, Noise
from edgedec_methods.drawn.drawn_trees import TreePlace, agreement, draw_tree, drawn_without_replacement, parse_shape
from support.decoding.exact_distributions import Drawing, Law, sparse, text_of
from support.decoding.rule_checks import check_exact, models

T = TypeVar("T")
Drawn = Callable[..., Iterator[tuple[int, float]]]
"""Draws tokens of a law: `(law, place, key)` -> the tokens in the order drawn, each with a number that is 0 here."""


class Evaluated:
    """The drafter's model: its law after each path, one object for equal paths, and how often a level was asked for."""

    def __init__(self, q: Law) -> None:
        self.q, self.n_levels = q, 0

    def __call__(self, paths: Sequence[tuple[int, ...]]) -> list[Distribution]:
        self.n_levels += 1
        assert len({len(path) for path in paths}) == 1
        found = {path: sparse(self.q(path)) for path in paths}
        return [found[path] for path in paths]


def each_way(make: Callable[[Drawn], T]) -> list[tuple[float, T]]:
    """Return what `make` returns for every way in which it may draw tokens without replacement, with the probability.

    Args:
        make: Gets what stands for drawn_without_replacement of edgedec_methods.drawn.drawn_trees.
    """
    waiting: list[tuple[int, ...]] = [()]
    ways: list[tuple[float, T]] = []
    while waiting:
        script, taken, chances = waiting.pop(), list[int](), list[float]()

        def drawn(
            law: Distribution,
            place: TreePlace,
            key: int = 0,
            script: tuple[int, ...] = script,
            taken: list[int] = taken,
            chances: list[float] = chances,
        ) -> Iterator[tuple[int, float]]:
            left = dict(zip(law.token_ids.tolist(), law.probs.tolist(), strict=True))
            while left:
                i, tokens, mass = len(taken), list(left), sum(left.values())
                if i >= len(script):
                    waiting.extend((*taken, other) for other in range(1, len(tokens)))
                taken.append(script[i] if i < len(script) else 0)
                token = tokens[taken[-1]]
                chances.append(left.pop(token) / mass)
                yield token, 0.0

        made = make(drawn)
        ways.append((float(np.prod(chances)), made))
    return ways


def all_draws(shape: str, q: Law, n_max: int, least_path: float = 0.0) -> list[Drawing]:
    """Return every tree that a shape may draw, with its probability: each draw is made in every way."""

    def make(drawn: Drawn) -> Draft:
        draft = draw_tree(parse_shape(shape), Evaluated(q), drawn, n_max, least_path)
        assert len(draft) <= n_max
        return draft

    return [(chance, draft, draft.q or [None] * len(draft)) for chance, draft in each_way(make)]


def check_drawn_tree(rule: str, shape: str, n_vocab: int, n_max: int, least_path: float) -> None:
    """Check over all draws of tiny models, with trees cut by their room and by their chances, that a rule is exact."""
    target, q = models(n_max, n_vocab, 6)
    drawings = all_draws(shape, q, n_max, least_path)
    length = 1 + max(max(draft.depths(), default=0) for _, draft, _ in drawings)
    assert length > 2
    assert check_exact(rule, drawings, target, n_vocab, length) > 0


def check_chances(shape: str, n_max: int, n_nodes: Sequence[int]) -> None:
    """Check how many nodes each level of a shape has, and the chance of each: that it is reached and accepted.

    With an agreement a of the law that they are drawn from, it is a (1 - a)^n for a node behind n others with the same
    text before them.
    """
    q, keys = models(7, 3, 6)[1], map(Noise(1).key, count())

    def drawn(law: Distribution, place: TreePlace) -> Iterator[tuple[int, float]]:
        return drawn_without_replacement(law, place, next(keys))

    for _ in range(5):
        draft = draw_tree(parse_shape(shape), Evaluated(q), drawn, n_max, 0.0)
        assert list(Counter(draft.depths()).values()) == list(n_nodes)
        before = [text_of(draft, int(parent)) for parent in draft.parents]
        for node, p in enumerate(draft.p_accept):
            a = agreement(sparse(q(before[node])))
            assert abs(p - a * (1 - a) ** before[:node].count(before[node])) < 1e-6
