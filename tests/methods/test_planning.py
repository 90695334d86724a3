"""PG-TD: it finds what only a search finds, ends when everything was tried, and with one text is greedy decoding."""

import math

import numpy as np
import pytest
from support.decoding.plain_texts import LENGTH, greedy, said, table_of
from support.decoding.table_branches import END, Ids, random_table, table_texts

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec_methods.planning import Planning, planned


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
