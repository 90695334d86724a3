"""The recycling drafter: what it proposes after which rows, how probable, within which bounds."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec.draft import Candidates, Draft, Verification
from edgedec.drafter import DraftContext, Drafter, Store
from edgedec.sampling import Noise, gumbel_of
from edgedec_methods.candidate_table import CandidateTable, context_key
from edgedec_methods.drawn.rule_tools import children_of
from edgedec_methods.recycling import RecyclingDrafter

MakeContext = Callable[..., DraftContext]
MakeCandidates = Callable[[list[tuple[int, dict[int, float]]]], Candidates]
KNOWN = 0.65


def after(drafter: Drafter, *text: int) -> Draft:
    """Return what the drafter proposes after a text."""
    drafter.begin(text)
    return drafter.propose(32, 1e18)


def test_the_prompt_fills_in_what_followed_each_token(make_context: MakeContext) -> None:
    """After 1 came 2 twice and 3 once, of three times and one more that nobody saw."""
    draft = after(RecyclingDrafter(make_context()), 1, 2, 1, 3, 1, 2, 9, 1)
    first = children_of(draft)[-1]
    assert [draft.tokens[node] for node in first] == [2, 3]
    assert [draft.p_accept[node] for node in first] == pytest.approx([KNOWN * 2 / 4, KNOWN * 1 / 4])
    # 2 was followed by 1 and by 9, 3 by 1 only
    below_two, below_three = ([draft.tokens[child] for child in children_of(draft)[node]] for node in first[:2])
    assert (below_two, below_three) == ([1, 9], [1])


def test_rows_of_the_target_make_the_tree(make_context: MakeContext, candidates: MakeCandidates) -> None:
    """Nodes come in order of path probability, those of rejected rows too, and the newest row counts."""
    drafter = RecyclingDrafter(make_context())
    drafter.begin([1])
    rows = [(1, {10: 0.6, 11: 0.3}), (10, {20: 0.9, 21: 0.05}), (11, {20: 0.5, 22: 0.4})]
    drafter.learn(Verification((), (1,), candidates(rows)), {})
    draft = drafter.propose(5, 1e18)
    assert list(draft.tokens) == [10, 20, 11, 20, 22]
    assert list(draft.parents) == [-1, 0, -1, 2, 2]
    assert list(draft.p_accept) == pytest.approx([KNOWN * p for p in (0.6, 0.9, 0.3, 0.5, 0.4)])
    drafter.learn(Verification((), (1,), candidates([(1, {30: 0.8, 10: 0.1})])), {})
    assert list(drafter.propose(1, 1e18).tokens) == [30]


def test_the_row_of_the_accepted_path_stays(make_context: MakeContext) -> None:
    """Of a token at two nodes the row that the text went along is kept, wherever it stands."""
    tokens, parents = np.array([1, 5, 7, 5], np.int32), np.array([-1, 0, 0, 2], np.int32)
    ids = np.array([[5], [10], [5], [11]], np.int32)
    candidates = Candidates(tokens, parents, ids, np.full((4, 1), 0.9, np.float32))
    for token_ids, expected in (((5, 5), 10), ((7, 5, 5), 11)):
        drafter = RecyclingDrafter(make_context())
        drafter.begin([1])
        drafter.learn(Verification((), token_ids, candidates), {})
        assert list(drafter.propose(1, 1e18).tokens) == [expected]


def test_without_candidates_the_text_teaches(make_context: MakeContext) -> None:
    """A token seen once after another gets a half; the next one seen there takes half of what was."""
    drafter = RecyclingDrafter(make_context())
    drafter.begin([1])
    drafter.learn(Verification((), (2, 1)), {})
    assert list(drafter.propose(1, 1e18).p_accept) == pytest.approx([KNOWN / 2])
    drafter.learn(Verification((), (3, 1)), {})
    assert drafter.longest(1)[1][:2] == [3, 2]
    assert drafter.longest(1)[2][:3] == pytest.approx([0.5, 0.25, 0.0])


def test_the_table_outlives_a_request(make_context: MakeContext, candidates: MakeCandidates) -> None:
    """The next drafter on the same store knows the rows; one on another store doesn't; begin() starts a new text."""
    store = Store()
    drafter = RecyclingDrafter(make_context(store=store))
    drafter.begin([1])
    drafter.learn(Verification((), (2,), candidates([(1, {2: 0.9})])), {})
    assert after(RecyclingDrafter(make_context(store=store)), 1).tokens == (2,)
    assert len(after(RecyclingDrafter(make_context()), 1)) == 0
    assert list(after(drafter, 1).tokens) == [2]


def test_a_child_is_the_token_that_the_noise_picks(make_context: MakeContext, candidates: MakeCandidates) -> None:
    """Above temperature 0 the first child is argmax(log q / T + Gumbel) at its absolute position, at every depth."""
    row = {10: 0.4, 11: 0.3, 12: 0.2, 262_143: 0.1}
    ids, q = np.array(list(row)), np.array(list(row.values()))
    picked = set()
    for temperature in (1.0, 0.7):
        drafter = RecyclingDrafter(make_context(temperature=temperature))
        drafter.begin([1, 2, 3])
        drafter.learn(Verification((), (10,), candidates([(token, row) for token in (3, *row)])), {})
        for position in range(4, 40):
            draft = drafter.propose(16, 1e18)
            for depth, parent in ((0, -1), (1, 0)):
                keys = np.log(q) / temperature + Noise(7).gumbel(position + depth, ids)
                children = [draft.tokens[node] for node in children_of(draft)[parent]]
                assert children == ids[np.argsort(-keys)].tolist()[: len(children)]
                assert children or depth
            picked.add(int(draft.tokens[0]))
            drafter.learn(Verification((), (10,)), {})
            drafter.table.learn([context_key(10, 1)], ids.astype(np.int32)[None], q.astype(np.float32)[None])
    assert picked == set(row)


@pytest.mark.slow
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**32), st.integers(0, 262_143))
def test_the_noise_of_one_token_is_the_targets(seed: int, position: int, token: int) -> None:
    """A token's number is Noise.gumbel's, but for the rounding of two logarithms."""
    noise = Noise(seed)
    assert gumbel_of(noise.key(position), token) == pytest.approx(float(noise.gumbel(position, np.array([token]))[0]))


@pytest.mark.slow
def test_a_table_takes_the_memory_it_says() -> None:
    """The count agrees with the allocator's within a third, also after every row was replaced."""
    row = np.arange(8, dtype=np.int32)[None], np.full((1, 8), 0.1, np.float32)
    tracemalloc.start()
    try:
        table = CandidateTable(2_000_000, 1.0)
        for filled in (6000, 30_000):
            for token in range(filled):
                table.learn([context_key(token << 20 | token, 2)], *row)
            held, _ = tracemalloc.get_traced_memory()
            assert table.memory_bytes() == pytest.approx(held, rel=1 / 3)
            assert table.memory_bytes() <= 2_000_000
    finally:
        tracemalloc.stop()
