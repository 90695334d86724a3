"""The trigram drafter: what it proposes after which pairs, how it explores, how it adapts."""

from collections.abc import Callable

import numpy as np
import pytest

from edgedec.draft import Candidates, Verification
from edgedec.drafter import DraftContext
from edgedec.sampling import Noise
from edgedec_methods.candidate_table import context_key
from edgedec_methods.drawn.rule_tools import children_of
from edgedec_methods.trigram import TrigramDrafter

MakeContext = Callable[..., DraftContext]
MakeCandidates = Callable[[list[tuple[int, dict[int, float]]]], Candidates]
PAIR, SINGLE = 0.8, 0.65  # how often the text goes on as a pair, or the last token alone, says


def test_a_pair_tells_more_than_its_last_token(make_context: MakeContext) -> None:
    """After (1, 5) came 6, after (2, 5) came 7; an unknown pair falls back to what 5 alone says."""
    text = [1, 5, 6, 2, 5, 7]
    for before, tokens, p in ((1, [6], [PAIR / 2]), (2, [7], [PAIR / 2]), (3, [6, 7], [SINGLE / 3, SINGLE / 3])):
        drafter = TrigramDrafter(make_context())
        drafter.begin([*text, before, 5])
        draft = drafter.propose(32, 1e18)
        first = children_of(draft)[-1]
        assert [draft.tokens[node] for node in first] == tokens
        assert [draft.p_accept[node] for node in first] == pytest.approx(p)


def test_a_path_of_pairs_is_followed(make_context: MakeContext) -> None:
    """The prompt's own continuation, one pair after the other, each certain but for one sighting."""
    drafter = TrigramDrafter(make_context())
    drafter.begin([1, 2, 3, 4, 5, 1, 2])
    draft = drafter.propose(4, 1e18)
    assert (list(draft.tokens), draft.is_chain) == ([3, 4, 5, 1], True)
    assert list(draft.p_accept) == pytest.approx([PAIR / 2] * 4)


def test_a_new_row_weighs_a_half(make_context: MakeContext, candidates: MakeCandidates) -> None:
    """The average of two rows is exact; afterwards what was known keeps a half at most."""
    drafter = TrigramDrafter(make_context())
    key = context_key(1 << 20 | 2, 2)
    for row, p in (({8: 0.8, 9: 0.1}, [0.8, 0.1]), ({9: 0.6}, [0.4, 0.35]), ({9: 1.0}, [0.675, 0.2])):
        drafter.begin([1, 2])
        drafter.learn(Verification((), (7,), candidates([(2, row)])), {})
        assert drafter.table.row(key)[1][:2] == pytest.approx(p)


def test_what_is_little_known_is_explored_first(make_context: MakeContext, candidates: MakeCandidates) -> None:
    """Of children about as probable the one whose pair was never evaluated comes first; p_accept has no bonus."""
    drafter = TrigramDrafter(make_context())
    row = {8: 0.42, 9: 0.4}
    drafter.begin([1, 2])
    drafter.learn(Verification((), (7,), candidates([(2, row)])), {})
    drafter.begin([1, 2])
    assert list(drafter.propose(2, 1e18).tokens) == [8, 9]
    table = drafter.table
    for _ in range(3):
        table.learn([context_key(2 << 20 | 8, 2)], np.array([[5]], np.int32), np.array([[0.01]], np.float32))
    draft = drafter.propose(2, 1e18)
    assert list(draft.tokens) == [9, 8]
    assert list(draft.p_accept) == pytest.approx([PAIR * 0.4, PAIR * 0.42])


def test_a_child_is_the_token_that_the_noise_picks(make_context: MakeContext, candidates: MakeCandidates) -> None:
    """Above temperature 0 the most probable child is argmax(log q / T + Gumbel) at its absolute position."""
    row = {10: 0.4, 11: 0.3, 12: 0.2, 262_143: 0.1}
    ids, q = np.array(list(row)), np.array(list(row.values()))
    picked = set()
    for length in range(2, 60):
        drafter = TrigramDrafter(make_context(temperature=0.7))
        prompt = range(100, 100 + length)
        drafter.begin(prompt)
        drafter.learn(Verification((), (9,), candidates([(prompt[-1], row)])), {})
        drafter.begin(prompt)
        draft = drafter.propose(16, 1e18)
        best = draft.tokens[max(children_of(draft)[-1], key=draft.p_accept.__getitem__)]
        assert best == ids[np.argmax(np.log(q) / 0.7 + Noise(7).gumbel(length, ids))]
        picked.add(best)
    assert picked == set(row)
