"""Trees that are grown from a model's distributions: exact sums over all draws, and draws against these sums."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np
import pytest
from support.exact_distributions import Drawing, Law, integrate, joint_of, mixed_law, random_law, sparse

from edgedec.draft import Draft
from edgedec.drafters.draft_builder import Level
from edgedec.drafters.drawn_trees import Place, draw_tree, drawn_without_replacement, grow_ranked
from edgedec.drafters.levels import agreement
from edgedec.noise import Noise
from edgedec.sampling import Distribution
from edgedec.tree_shapes import parse_shape
from edgedec.verification import RULES

pytestmark = pytest.mark.slow

Nodes = tuple[tuple[int, ...], tuple[int, ...]]


def models(seed: int, n_vocab: int, length: int) -> tuple[Law, Law]:
    """Return a target and a drafter that differs from it."""
    rng = np.random.default_rng(seed)
    target = random_law(rng, n_vocab, length)
    return target, mixed_law(target, random_law(rng, n_vocab, length), 0.6)


class Evaluated:
    """The drafter's model: its law after each path, one object for equal paths, and how often a level was asked for."""

    def __init__(self, q: Law) -> None:
        self.q, self.n_levels = q, 0

    def __call__(self, paths: Sequence[tuple[int, ...]]) -> list[Distribution]:
        self.n_levels += 1
        assert len({len(path) for path in paths}) == 1
        found = {path: sparse(self.q(path)) for path in paths}
        return [found[path] for path in paths]


def all_draws(shape: str, q: Law, n_max: int, least_path: float = 0.0) -> list[Drawing]:
    """Return every tree that a shape may draw, with its probability: each draw is made in every way."""
    waiting: list[tuple[int, ...]] = [()]
    drawings: list[Drawing] = []
    while waiting:
        script = waiting.pop()
        taken: list[int] = []
        chances: list[float] = []

        def drawn(
            law: Distribution,
            place: Place,
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

        draft = draw_tree(parse_shape(shape), Evaluated(q), drawn, n_max, least_path, agreement)
        assert len(draft) <= n_max
        drawings.append((float(np.prod(chances)), draft, draft.q or [None] * len(draft)))
    return drawings


def check_exact(rule: str, drawings: Sequence[Drawing], target: Law, n_vocab: int, length: int) -> float:
    """Check that the text is distributed as the target's; return the mean number of accepted tokens."""
    result = integrate(RULES[rule], drawings, target, n_vocab, length)
    assert np.abs(result.joint - joint_of(target, n_vocab, length)).max() < 1e-12
    return result.n_accepted


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
        ("recursive", "grow", 3, 4, 0.0),
        ("recursive", "grow", 3, 6, 0.25),
        ("recursive", "grow", 2, 8, 0.2),
    ],
)
def test_a_drawn_tree_is_verified_exactly(rule: str, shape: str, n_vocab: int, n_max: int, least_path: float) -> None:
    """Over all draws of tiny models, with trees cut by their room and by their chances, the text is the target's."""
    target, q = models(n_max, n_vocab, 6)
    drawings = all_draws(shape, q, n_max, least_path)
    length = 1 + max(max(draft.depths(), default=0) for _, draft, _ in drawings)
    assert length > 2
    assert check_exact(rule, drawings, target, n_vocab, length) > 0


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


@pytest.mark.parametrize(("n_vocab", "depth", "width"), BEAMS)
def test_a_beam_is_verified_exactly(n_vocab: int, depth: int, width: int) -> None:
    """Of all beams, as texts drawn without replacement make them, recursive rejection makes the target's text."""
    target, q = models(depth + width, n_vocab, depth + 1)
    assert check_exact("recursive", beam_drawings(beams(q, n_vocab, depth, width), q), target, n_vocab, depth + 1) > 0


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
            law: Distribution, place: Place, seed: int = seed, numbers: Iterator[int] = numbers
        ) -> Iterator[tuple[int, float]]:
            return drawn_without_replacement(law, place, Noise(seed).key(next(numbers)))

        laws = Evaluated(q)
        draft = draw_tree(parse_shape(f"beam:{width}"), laws, drawn, n_max, 0.0, agreement)
        assert laws.n_levels == depth
        found[draft.tokens, draft.parents] += 1
    assert set(found) <= set(expected)
    likely = [nodes for nodes, p in expected.items() if p * n >= 5]
    chi_square = sum((found[nodes] - n * expected[nodes]) ** 2 / (n * expected[nodes]) for nodes in likely)
    freedom = len(likely) - 1
    assert freedom >= 3
    assert chi_square < freedom + 4 * sqrt(2 * freedom)


def test_gumbel_top_k_draws_without_replacement() -> None:
    """Ordered triples of four tokens come as often as drawing without replacement makes them (chi-square)."""
    law = Distribution(np.array([2, 3, 5, 9]), np.array([0.5, 0.25, 0.15, 0.1]))
    n, found = 6000, Counter[tuple[int, ...]]()
    for seed in range(n):
        drawn = [token for token, _ in drawn_without_replacement(law, Place(), Noise(7).key(seed))]
        keys = [key for _, key in drawn_without_replacement(law, Place(key=0.5), Noise(7).key(seed))]
        assert keys[0] == pytest.approx(0.5)
        assert keys == sorted(keys, reverse=True)
        assert sorted(drawn) == law.token_ids.tolist()
        found[tuple(drawn[:3])] += 1
    probs = dict(zip(law.token_ids.tolist(), law.probs.tolist(), strict=True))
    chi_square = 0.0
    for triple in itertools.permutations(probs, 3):
        weight, left = 1.0, 1.0
        for token in triple:
            weight, left = weight * probs[token] / left, left - probs[token]
        chi_square += (found[triple] - n * weight) ** 2 / (n * weight)
    assert chi_square < 23 + 4 * sqrt(46)


def test_the_most_probable_tokens_grow_by_path_probability() -> None:
    """Nodes of at least the threshold get children, those of a third of it are leaves; a level is one evaluation."""
    table = {(): [(5, 0.6), (6, 0.3), (7, 0.02)], (5,): [(1, 0.5), (2, 0.1)], (6,): [(3, 0.9)], (5, 1): [(4, 0.2)]}
    asked: list[list[tuple[int, ...]]] = []

    def levels(paths: Sequence[tuple[int, ...]]) -> list[Level | None]:
        asked.append(list(paths))
        return [
            Level([token for token, _ in table[path]], [p for _, p in table[path]]) if path in table else None
            for path in paths
        ]

    draft = grow_ranked(levels, 16, 0.15)
    assert asked == [[()], [(5,), (6,)], [(5, 1), (6, 3)]]
    assert list(zip(draft.tokens, draft.parents, draft.p_accept, strict=True)) == [
        (5, -1, 0.6),
        (6, -1, 0.3),
        (1, 0, 0.5),
        (3, 1, 0.9),
        (2, 0, 0.1),
        (4, 2, 0.2),
    ]
    assert draft.q is None
    assert grow_ranked(levels, 3, 0.15).tokens == (5, 6, 1)
