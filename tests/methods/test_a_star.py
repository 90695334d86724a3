"""A*: the optimum of an enumeration, in fewer expansions; and over texts, what one step a prefix reduces to."""

import heapq
import math
from collections.abc import Sequence
from itertools import product

import numpy as np
import pytest
from support.decoding.plain_texts import LENGTH, PARAMS, PROMPT, is_over, said, table_of
from support.decoding.table_branches import END, Ids, Table, letters, random_table, table_texts

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.sampling import Noise, draw
from edgedec_methods.a_star import a_star, cheapest, cost_of
from edgedec_methods.sampled_steps import Steps, write_steps

WIDTH, DEPTH = 3, 5
Node = tuple[int, ...]
ROOT: Node = ()


@pytest.mark.parametrize("seed", range(20))
def test_the_optimum_in_fewer_expansions(seed: int) -> None:
    """Of all texts of five steps the one with the highest product of scores, without expanding every prefix."""
    rng = np.random.default_rng(seed)
    scores = {ids: float(rng.uniform(0.05, 1)) for n in range(1, DEPTH + 1) for ids in product(range(WIDTH), repeat=n)}

    def expand(node: Node) -> list[tuple[float, Node]]:
        return [(cost_of(scores[(*node, i)]), (*node, i)) for i in range(WIDTH)]

    totals = {
        ids: sum(cost_of(scores[ids[: i + 1]]) for i in range(DEPTH)) for ids in product(range(WIDTH), repeat=DEPTH)
    }
    n_prefixes = sum(WIDTH**n for n in range(DEPTH))
    found = cheapest(ROOT, expand, lambda node: len(node) == DEPTH, most_expanded=10**6)
    assert found.node == min(totals, key=totals.__getitem__)
    assert found.cost == pytest.approx(min(totals.values()))
    assert DEPTH <= found.n_expanded < n_prefixes
    least = min(map(cost_of, scores.values()))
    guided = cheapest(
        ROOT,
        expand,
        lambda node: len(node) == DEPTH,
        most_expanded=10**6,
        at_least=lambda node: least * (DEPTH - len(node)),
    )
    assert guided.node == found.node
    assert guided.n_expanded <= found.n_expanded


def test_when_the_expansions_are_over_the_rest_is_returned() -> None:
    """No whole node: every node of the heap is left, the cheapest first, and none is lost."""
    found = cheapest(
        ROOT, lambda node: [(1.0, (*node, 0)), (2.0, (*node, 1))], lambda node: len(node) == 9, most_expanded=2
    )
    assert found.node is None
    assert found.cost == math.inf
    assert found.left == ((2.0, (0, 0)), (2.0, (1,)), (3.0, (0, 1)))


def prefers_b(texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
    """Score a text by how much of it is the letter b."""
    found = [texts.text(text) for text in live]
    return [(1 + text.count("b")) / (2 + len(text)) for text in found]


@pytest.mark.parametrize("seed", range(10))
def test_one_step_behind_each_prefix_is_plain(seed: int) -> None:
    """n_steps = 1 writes the text that the seed writes alone."""
    table = random_table(seed, n_vocab=4, length=5)
    plain, single = table_texts(table, max_tokens=5)[0], table_texts(table, max_tokens=5)[0]
    with plain, single:
        (text,) = write_steps(plain, [plain.begin()], PARAMS, [seed], separator=None)
        found, _ = a_star(single, 1, Steps(PARAMS, seed=seed, separator=None, most=1), prefers_b)
        assert found.token_ids == text.token_ids


def plain_a_star(table: Table, n_steps: int, seed: int) -> tuple[Ids, int]:
    """Return the cheapest text by steps of one token, and how many prefixes were expanded to find it."""
    open_ones: list[tuple[float, int, Ids]] = [(0.0, 0, ())]
    n_expanded = n_found = 0
    while True:
        cost, _, ids = heapq.heappop(open_ones)
        if is_over(ids):
            return ids, n_expanded
        seen, first = (*PROMPT, *ids), seed + n_steps * n_expanded
        drawn = [draw(table[ids], PARAMS, seen, Noise(first + k), len(seen)) for k in range(n_steps)]
        for token in dict.fromkeys(drawn):
            written = letters([each for each in (*ids, token) if each != END])
            n_found += 1
            chance = (1 + written.count("b")) / (2 + len(written))
            heapq.heappush(open_ones, (cost - math.log(chance), n_found, (*ids, token)))
        n_expanded += 1


@pytest.mark.parametrize("seed", range(5))
def test_the_text_is_that_of_a_search_over_tokens(seed: int) -> None:
    """The scores of steps decide as they do in a plain search of the same draws, in as many expansions."""
    table = table_of(seed)
    texts, _ = table_texts(table, max_tokens=LENGTH)
    with texts:
        found, n_expanded = a_star(texts, 3, Steps(PARAMS, seed=seed, separator=None, most=1), prefers_b)
        assert (said(found), n_expanded) == plain_a_star(table, 3, seed)


@pytest.mark.parametrize("most_expanded", [1, 2, 50])
def test_a_text_is_whole_in_the_end(most_expanded: int) -> None:
    """Also where the expansions are over before; nothing is left open."""
    texts, branches = table_texts(random_table(1, n_vocab=3, length=6), max_tokens=6)
    with texts:
        found, n_expanded = a_star(
            texts, 4, Steps(PARAMS, separator=None, most=2), prefers_b, most_expanded=most_expanded
        )
        assert found.ended is not None
        assert n_expanded <= most_expanded
        assert list(branches.held) == [found.branch]
    assert not branches.held
