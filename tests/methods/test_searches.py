"""Searches of texts against plain forms: the optimum of an enumeration, in fewer expansions; greedy decoding."""

import heapq
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from support.decoding.plain_texts import LENGTH, PARAMS, PROMPT, greedy, is_over, said, table_of
from support.decoding.table_branches import END, Ids, Table, letters, log_law, random_table, table_texts, whole_texts

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.errors import OptionError
from edgedec.sampling import Noise, draw
from edgedec_methods.a_star import a_star, cheapest, cost_of
from edgedec_methods.adadec import LookAhead
from edgedec_methods.beam import beam_search
from edgedec_methods.cntp import Caution
from edgedec_methods.diverse_beams import diverse_beams
from edgedec_methods.particles import filtered
from edgedec_methods.planning import Planning, planned
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


def plain_a_star(table: Table, n_steps: int, seed: int, ahead: float) -> tuple[Ids, int]:
    """Return the first text by steps of one token, and how many prefixes were expanded to find it."""
    open_ones: list[tuple[float, int, Ids, float]] = [(0.0, 0, (), 0.0)]
    n_expanded = n_found = 0
    while True:
        _, _, ids, cost = heapq.heappop(open_ones)
        if is_over(ids):
            return ids, n_expanded
        seen, first = (*PROMPT, *ids), seed + n_steps * n_expanded
        drawn = [draw(table[ids], PARAMS, seen, Noise(first + k), len(seen)) for k in range(n_steps)]
        for token in dict.fromkeys(drawn):
            written = letters([each for each in (*ids, token) if each != END])
            n_found += 1
            chance = (1 + written.count("b")) / (2 + len(written))
            new = cost - math.log(chance)
            heapq.heappush(open_ones, (new + ahead * (1 - chance), n_found, (*ids, token), new))
        n_expanded += 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("ahead", [0.0, 1.0, 3.0])
def test_the_text_is_that_of_a_search_over_tokens(seed: int, ahead: float) -> None:
    """The scores of steps decide as they do in a plain search of the same draws, in as many expansions."""
    table = table_of(seed)
    texts, _ = table_texts(table, max_tokens=LENGTH)
    with texts:
        found, n_expanded = a_star(texts, 3, Steps(PARAMS, seed=seed, separator=None, most=1), prefers_b, ahead=ahead)
        assert (said(found), n_expanded) == plain_a_star(table, 3, seed, ahead)


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


def reward_by(goal: Ids) -> "object":
    """Return a reward: the share of a goal's tokens that a text has at their places."""

    def reward(texts: PartialTexts, live: "list[PartialText]", /) -> list[float]:
        return [sum(a == b for a, b in zip(text.token_ids, goal, strict=False)) / len(goal) for text in live]

    return reward


@pytest.mark.parametrize("seed", range(10))
def test_one_rollout_is_greedy(seed: int) -> None:
    """The first text that is judged is greedy decoding's."""
    table = table_of(seed)
    texts, branches = table_texts(table, max_tokens=LENGTH)
    with texts:
        found = planned(texts, reward_by((1, 2, 3)), Planning(n_rollouts=1))  # type: ignore[arg-type]
        assert found.text.token_ids == tuple(token for token in greedy(table) if token != END)
        assert found.n_rollouts == 1
    assert not branches.held


@pytest.mark.parametrize("seed", range(6))
def test_planning_finds_what_only_a_search_finds(seed: int) -> None:
    """With all tokens as children and enough rollouts, it finds a text that greedy decoding would not write."""
    table = random_table(seed, n_vocab=3, length=3)
    goal = (2, 1, 2)
    texts, branches = table_texts(table, max_tokens=3)
    with texts:
        found = planned(texts, reward_by(goal), Planning(n_rollouts=64, n_children=3, least=0.0))  # type: ignore[arg-type]
        assert found.text.token_ids == goal
        assert found.reward == 1
        assert found.n_rollouts <= 1 + 2 + 4 + 8 + 15
    assert not branches.held


def test_planning_ends_when_everything_was_tried() -> None:
    """A reward that is never 1: every text is judged once or more, and the search stops by itself."""
    table = random_table(0, n_vocab=3, length=2)
    texts, branches = table_texts(table, max_tokens=2)
    with texts:
        judged: list[Ids] = []

        def reward(texts: PartialTexts, live: "list[PartialText]", /) -> list[float]:
            judged.extend(said(text) for text in live)
            return [0.5] * len(live)

        found = planned(texts, reward, Planning(n_rollouts=256, least=0.0))  # type: ignore[arg-type]
        assert set(judged) == {(0,), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2)}
        assert found.n_rollouts == len(judged) < 20
    assert not branches.held


def planned_by(values: dict[Ids, float], texts: PartialTexts, planning: Planning) -> list[Ids]:
    """Search with these rewards, and return what was judged."""
    judged: list[Ids] = []

    def reward(texts: PartialTexts, live: "list[PartialText]", /) -> list[float]:
        judged.extend(text.token_ids for text in live)
        return [values[text.token_ids] for text in live]

    planned(texts, reward, planning)  # type: ignore[arg-type]
    return judged


@pytest.mark.parametrize(("factor", "first"), [(0.0, 2), (0.999, 2), (1.001, 1), (100.0, 1)])
def test_the_prefix_with_the_highest_bound_is_expanded(factor: float, first: int) -> None:
    """P-UCB, value + (log((n + 11) / 10) + c) p sqrt(log n) / (1 + visits), is equal at one c; n is 3, visits are 1."""
    table = {**random_table(0, n_vocab=3, length=2), (): np.log([1e-4, 0.7, 0.3], dtype=np.float32)}
    table |= {ids: np.array([-9, 1, 0], np.float32) for ids in [(1,), (2,)]}
    values: dict[Ids, float] = {(1, 1): 0.2, (2, 1): 0.5, (1, 2): 0.1, (2, 2): 0.1}
    equal = 0.3 * 2 / ((0.7 - 0.3) / 1.0001 * math.sqrt(math.log(3))) - math.log((3 + 11) / 10)
    texts, _ = table_texts(table, max_tokens=2)
    with texts:
        judged = planned_by(values, texts, Planning(n_rollouts=5, n_children=2, exploration=factor * equal))
    assert judged == [(1, 1), (1, 1), (2, 1), (first, 1), (first, 2)]


def test_a_prefix_is_worth_its_best_text() -> None:
    """Where nothing else counts, the search goes on behind it, whatever its other texts got."""
    table = {ids: np.array([-9, 1, 0], np.float32) for ids in random_table(0, n_vocab=3, length=3)}
    values: dict[Ids, float] = {(1, 1, 1): 0.2, (2, 1, 1): 0.5, (2, 2, 1): 0.1, (2, 1, 2): 0.3}
    texts, _ = table_texts(table, max_tokens=3)
    with texts:
        judged = planned_by(values, texts, Planning(n_rollouts=7, n_children=2, exploration=0.0))
    assert judged == [(1, 1, 1), (1, 1, 1), (2, 1, 1), (2, 1, 1), (2, 2, 1), (2, 1, 1), (2, 1, 2)]


N_VOCAB, BEAM_LENGTH = 4, 4


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("length_penalty", [0.0, 1.0])
def test_a_beam_that_holds_everything_finds_the_optimum(seed: int, length_penalty: float) -> None:
    """With room for every text, the beam holds the texts of the enumeration, in the order of their rank."""
    table = random_table(seed, n_vocab=3, length=3)
    law = whole_texts(table, 3, 3)
    texts, branches = table_texts(table, max_tokens=3)
    with texts:
        found = beam_search(texts, 32, length_penalty=length_penalty)
        ranks = {ids: total / len(ids) ** length_penalty for ids, total in law.items()}
        assert [said(beam.text) for beam in found] == sorted(ranks, key=lambda ids: -ranks[ids])
        assert [beam.score for beam in found] == pytest.approx([law[said(beam.text)] for beam in found], abs=1e-6)
    assert not branches.held


@pytest.mark.parametrize("seed", range(6))
def test_a_beam_of_one_is_greedy(seed: int) -> None:
    """One beam takes the most probable token each time, and makes one forward a token."""
    table = random_table(seed, n_vocab=N_VOCAB, length=BEAM_LENGTH)
    texts, _ = table_texts(table, max_tokens=BEAM_LENGTH)
    ids: Ids = ()
    while len(ids) < BEAM_LENGTH and (not ids or ids[-1] != END):
        ids = (*ids, int(np.argmax(table[ids])))
    with texts:
        assert [said(beam.text) for beam in beam_search(texts, 1)] == [ids]
        assert texts.n_tokens == sum(texts.forwards.values()) == len([token for token in ids if token != END])


def plain_diverse(table: Table, width: int, n_groups: int, penalty: float, length_penalty: float) -> list[list[Ids]]:
    """Search without forks: every score is computed anew, text by text and token by token."""
    groups: list[dict[Ids, float]] = [{(): 0.0} for _ in range(n_groups)]
    for length in range(BEAM_LENGTH):
        chosen = list[int]()
        for g, group in enumerate(groups):
            found = dict[Ids, float]()
            for ids, score in group.items():
                if ids and ids[-1] == END:
                    found[ids] = score
                    continue
                for token in range(N_VOCAB):
                    own = log_law(table, (*ids, token)) - log_law(table, ids)
                    found[(*ids, token)] = score + own - penalty * chosen.count(token)
            best = sorted(found, key=lambda ids: -found[ids] / len(ids) ** length_penalty)[:width]
            chosen += [ids[-1] for ids in best if len(ids) == length + 1]
            groups[g] = {ids: found[ids] for ids in best}
    return [list(group) for group in groups]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("width", "n_groups", "penalty"), [(3, 1, 0.0), (2, 3, 0.8), (1, 4, 2.0), (2, 2, 0.0)])
def test_diverse_beams_are_those_of_the_plain_search(seed: int, width: int, n_groups: int, penalty: float) -> None:
    """Forked branches and shared forwards give the same texts, in the same order, in each group."""
    table = random_table(seed, n_vocab=N_VOCAB, length=BEAM_LENGTH)
    texts, branches = table_texts(table, max_tokens=BEAM_LENGTH)
    with texts:
        found = diverse_beams(texts, width * n_groups, n_groups=n_groups, penalty=penalty)
        expected = plain_diverse(table, width, n_groups, penalty, 1.0)
        assert [said(beam.text) for beam in found] == [ids for group in expected for ids in group]
    assert not branches.held


@pytest.mark.parametrize("seed", range(6))
def test_without_a_penalty_each_group_is_a_beam_search(seed: int) -> None:
    """Lambda 0 makes every group the plain beam search of its width."""
    table = random_table(seed, n_vocab=N_VOCAB, length=BEAM_LENGTH)
    alone, grouped = table_texts(table, max_tokens=BEAM_LENGTH)[0], table_texts(table, max_tokens=BEAM_LENGTH)[0]
    with alone, grouped:
        plain = [said(beam.text) for beam in beam_search(alone, 3)]
        assert [said(beam.text) for beam in diverse_beams(grouped, 9, n_groups=3, penalty=0.0)] == plain * 3


def test_a_penalty_makes_groups_differ() -> None:
    """With a large lambda no two groups begin with the same token; with 0 they all do."""
    table = random_table(3, n_vocab=N_VOCAB, length=BEAM_LENGTH)
    for penalty, n_first in ((0.0, 1), (50.0, 4)):
        texts, _ = table_texts(table, max_tokens=BEAM_LENGTH)
        with texts:
            found = diverse_beams(texts, 4, n_groups=4, penalty=penalty)
            assert len({said(beam.text)[0] for beam in found}) == n_first


Search = Callable[..., object]


def no_scores(texts: PartialTexts, live: Any, /) -> list[float]:
    """Score nothing."""
    raise AssertionError("texts were written")


def a_star_of(texts: PartialTexts, **numbers: int) -> object:
    """Search with these numbers."""
    return a_star(texts, steps=Steps(PARAMS), scorer=no_scores, **numbers)


def particles_of(texts: PartialTexts, n: int) -> object:
    """Search with so many particles."""
    return filtered(texts, n, Steps(PARAMS), no_scores)


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        *((LookAhead, each) for each in ({"entropy": math.nan}, {"n_candidates": 0}, {"n_tokens": 10**6})),
        *((Caution, each) for each in ({"most_trials": 0}, {"most_trials": 10**6}, {"low": 3.0, "high": 1.0})),
        (Caution, {"most_tokens": 0}),
        *((Planning, {"n_rollouts": n}) for n in (0, 10**6)),
        *((Planning, each) for each in ({"n_children": 0}, {"least": 2.0}, {"exploration": -1.0})),
    ],
)
def test_options_are_refused(options: Callable[..., object], wrong: dict[str, Any]) -> None:
    """Each with a message that says what is accepted."""
    with pytest.raises(OptionError):
        options(**wrong)


@pytest.mark.parametrize(
    ("search", "wrong"),
    [
        *((beam_search, {"n_beams": n}) for n in (0, 10**6)),
        *((beam_search, {"n_beams": 2, "length_penalty": x}) for x in (-1.0, math.nan, 11.0)),
        *((diverse_beams, {"n_beams": 4, "n_groups": n}) for n in (3, 0)),
        *((diverse_beams, {"n_beams": 2, "n_groups": 1, "penalty": x}) for x in (-1.0, math.nan)),
        (diverse_beams, {"n_beams": 10**6, "n_groups": 1}),
        *((a_star_of, {"n_steps": n}) for n in (0, 10**6)),
        (a_star_of, {"n_steps": 4, "most_expanded": 10**6}),
        *((particles_of, {"n": n}) for n in (0, -1, 10**6)),
    ],
)
def test_searches_are_refused(search: Search, wrong: dict[str, Any]) -> None:
    """And the prompt's branch is the only one that was opened."""
    texts, branches = table_texts(random_table(0, n_vocab=3, length=2), max_tokens=2)
    with texts, pytest.raises(OptionError, match="particles" if search is particles_of else "."):
        search(texts, **wrong)
    assert branches.n_opened == 1
