"""First Finish Search: the shortest text that ended by itself, and what the search spends on it."""

from types import SimpleNamespace
from typing import Any

import pytest
from support.decoding.table_branches import random_table, table_texts

from edgedec.choosing.choice import Candidates, chooser_named
from edgedec.sampling import SamplingParams
from edgedec_methods.first_finish import first_finish, first_finished
from edgedec_methods.sampled_steps import seeds_from, write_steps

PARAMS = SamplingParams(temperature=1.0, top_p=1.0)
ENDS = (("stop", 9), ("length", 4), ("stop", 5), ("length", 3), ("cancelled", 1))


def test_the_first_that_finished() -> None:
    """The shortest text that ended by itself; the first where none did."""
    assert first_finished([False, True, True], [2, 9, 5]) == 2
    assert first_finished([False, False], [2, 1]) == 0


def test_of_whole_texts_the_shortest_that_ended_is_chosen() -> None:
    """A text that was cut or stopped early is none of them, however short; of cut ones alone the shortest."""
    texts: Any = [SimpleNamespace(finish_reason=why, token_ids=range(n)) for why, n in ENDS]
    choose = chooser_named("first").choose
    assert choose(Candidates(texts, [0, 1, 2, 3], [None] * 5)) == (2, "it ended first, after 5 tokens")
    assert choose(Candidates(texts, [1, 3], [None] * 5))[0] == 3


@pytest.mark.parametrize("seed", range(20))
def test_first_finish_search_is_the_choice_among_whole_texts(seed: int) -> None:
    """It returns what choosing the shortest of all whole texts would, with the steps of that text only."""
    table = random_table(seed, n_vocab=4, length=6)
    whole, search = table_texts(table, max_tokens=6)[0], table_texts(table, max_tokens=6)[0]
    with whole, search:
        root = whole.begin()
        live = [root, *(whole.fork(root) for _ in range(3))]
        written = write_steps(whole, live, PARAMS, seeds_from(seed, 4), separator=None)
        lengths = [text.n_scored for text in written]
        place = first_finished([text.ended == "stop" for text in written], lengths)
        root = search.begin()
        live = [root, *(search.fork(root) for _ in range(3))]
        found = first_finish(search, live, PARAMS, seeds_from(seed, 4))
        assert found.token_ids == written[place].token_ids
        assert sum(search.forwards.values()) <= len(found.token_ids) + 1
