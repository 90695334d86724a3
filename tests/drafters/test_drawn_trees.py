"""Trees that are grown from a model's distributions: exact sums over all draws, and draws against these sums."""

import itertools
from collections import Counter
from collections.abc import Sequence
from math import sqrt

import numpy as np
import pytest
from support.decoding.tree_draws import check_drawn_tree

from edgedec.drafters.draft_builder import Level
from edgedec.sampling import Distribution, Noise
from edgedec_methods.drawn.drawn_trees import TreePlace, drawn_without_replacement, grow_ranked

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("rule", "shape", "n_vocab", "n_max", "least_path"),
    [("recursive", "grow", 3, 4, 0.0), ("recursive", "grow", 3, 6, 0.25), ("recursive", "grow", 2, 8, 0.2)],
)
def test_a_drawn_tree_is_verified_exactly(rule: str, shape: str, n_vocab: int, n_max: int, least_path: float) -> None:
    """Over all draws of tiny models the text is the target's."""
    check_drawn_tree(rule, shape, n_vocab, n_max, least_path)


def test_gumbel_top_k_draws_without_replacement() -> None:
    """Ordered triples of four tokens come as often as drawing without replacement makes them (chi-square)."""
    law = Distribution(np.array([2, 3, 5, 9]), np.array([0.5, 0.25, 0.15, 0.1]))
    n, found = 6000, Counter[tuple[int, ...]]()
    for seed in range(n):
        drawn = [token for token, _ in drawn_without_replacement(law, TreePlace(), Noise(7).key(seed))]
        keys = [key for _, key in drawn_without_replacement(law, TreePlace(key=0.5), Noise(7).key(seed))]
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
