"""Drawn shapes: beams, siblings and paths come as often as they should, and are verified exactly by their rules."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator
from math import sqrt

import numpy as np
import pytest
from support.decoding.exact_distributions import Drawing, Law, joint_of, sparse
from support.decoding.rule_checks import check_exact, models
from support.decoding.tree_draws import Evaluated, check_chances, check_drawn_tree

from edgedec.draft import Draft
from edgedec.sampling import Distribution, Noise
from edgedec_methods.drawn.drawn_trees import TreePlace, draw_tree, drawn_without_replacement, parse_shape

Nodes = tuple[tuple[int, ...], tuple[int, ...]]


def beams(q: Law, n_vocab: int, depth: int, width: int) -> dict[Nodes, float]:
    """Return the probability of every beam, from the order in which whole texts are drawn without replacement.

    Stochastic beam search keeps, on each level, the first beginnings of texts in that order (Kool et al. 2019).
    """
    leaves = {text: float(p) for text, p in np.ndenumerate(joint_of(q, n_vocab, depth))}
    found: dict[Nodes, float] = defaultdict(float)
    waiting: list[tuple[float, tuple[tuple[int, ...], ...]]] = [(1.0, ())]
    while waiting:
        weight, order = waiting.pop()
        levels = [list(dict.fromkeys(text[:n] for text in order))[:width] for n in range(1, depth + 1)]
        is_full = all(len(level) == min(width, n_vocab**n) for n, level in enumerate(levels, 1))
        if is_full or len(order) == len(leaves):
            paths = [path for level in levels for path in level]
            places = {path: node for node, path in enumerate(paths)}
            parents = tuple(places.get(path[:-1], -1) for path in paths)
            found[tuple(path[-1] for path in paths), parents] += weight
            continue
        left = 1 - sum(leaves[text] for text in order)
        waiting += [(weight * p / left, (*order, text)) for text, p in leaves.items() if text not in order]
    return found


def beam_drawings(law: dict[Nodes, float], q: Law) -> list[Drawing]:
    """Return the beams as drafts; siblings share a q."""
    drawings: list[Drawing] = []
    for (tokens, parents), weight in law.items():
        paths: list[tuple[int, ...]] = []
        for token, parent in zip(tokens, parents, strict=True):
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
        laws = {path[:-1]: sparse(q(path[:-1])) for path in paths}
        drawings.append((weight, Draft.tree(tokens, parents, [1.0] * len(tokens)), [laws[path[:-1]] for path in paths]))
    return drawings


BEAMS = [(2, 2, 2), (2, 3, 2), (3, 2, 2), (2, 2, 3)]


@pytest.mark.slow
@pytest.mark.parametrize(("n_vocab", "depth", "width"), BEAMS)
def test_a_beam_is_verified_exactly(n_vocab: int, depth: int, width: int) -> None:
    """Of all beams, as texts drawn without replacement make them, recursive rejection makes the target's text."""
    target, q = models(depth + width, n_vocab, depth + 1)
    assert check_exact("recursive", beam_drawings(beams(q, n_vocab, depth, width), q), target, n_vocab, depth + 1) > 0


@pytest.mark.slow
@pytest.mark.parametrize(("n_vocab", "depth", "width"), BEAMS)
def test_beams_come_as_often_as_they_should(n_vocab: int, depth: int, width: int) -> None:
    """Over 3,000 seeds each beam comes as often as its probability says (chi-square), a level an evaluation."""
    _, q = models(depth + width, n_vocab, depth + 1)
    expected, n = beams(q, n_vocab, depth, width), 3000
    n_max = sum(min(width, n_vocab**level) for level in range(1, depth + 1))
    found: Counter[Nodes] = Counter()
    for seed in range(n):
        numbers = itertools.count()

        def drawn(
            law: Distribution, place: TreePlace, seed: int = seed, numbers: Iterator[int] = numbers
        ) -> Iterator[tuple[int, float]]:
            return drawn_without_replacement(law, place, Noise(seed).key(next(numbers)))

        laws = Evaluated(q)
        draft = draw_tree(parse_shape(f"beam:{width}"), laws, drawn, n_max, 0.0)
        assert laws.n_levels == depth
        found[draft.tokens, draft.parents] += 1
    assert set(found) <= set(expected)
    likely = [nodes for nodes, p in expected.items() if p * n >= 5]
    chi_square = sum((found[nodes] - n * expected[nodes]) ** 2 / (n * expected[nodes]) for nodes in likely)
    freedom = len(likely) - 1
    assert freedom >= 3
    assert chi_square < freedom + 4 * sqrt(2 * freedom)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "shape", "n_vocab", "n_max", "least_path"),
    [
        ("kseq", "paths:2", 3, 4, 0.0),
        ("kseq", "paths:3", 2, 6, 0.5),
        ("kseq", "paths:2", 2, 5, 0.0),
        ("multipath", "paths:2", 3, 4, 0.0),
        ("multipath", "paths:3", 2, 6, 0.5),
        ("multipath", "paths:2", 2, 5, 0.0),
        ("recursive", "siblings:2", 3, 4, 0.0),
        ("recursive", "siblings:2-2", 2, 6, 0.0),
        ("recursive", "siblings:3-2", 3, 5, 0.2),
        ("recursive", "siblings:2-2", 2, 6, 0.4),
    ],
)
def test_a_drawn_tree_is_verified_exactly(rule: str, shape: str, n_vocab: int, n_max: int, least_path: float) -> None:
    """Over all draws of tiny models the text is the target's, by independent paths and siblings without replacement."""
    check_drawn_tree(rule, shape, n_vocab, n_max, least_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "n_max", "n_nodes"),
    [
        ("beam:2", 6, [2, 2, 2]),
        ("beam:3", 7, [3, 3, 1]),
        ("paths:2", 6, [2, 2, 2]),
        ("paths:3", 5, [3, 2]),
        ("siblings:2", 6, [2, 2, 2]),
        ("siblings:3-2", 8, [3, 5]),
        ("siblings:1-2", 7, [1, 2, 2, 2]),
    ],
)
def test_nodes_have_the_chances_of_their_places(shape: str, n_max: int, n_nodes: list[int]) -> None:
    """And each level has as many as the shape says, as far as there is room."""
    check_chances(shape, n_max, n_nodes)
