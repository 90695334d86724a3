"""Drafters on a table of n-grams: what holds for every one, and what recycling, stand and trigram propose."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec.draft import Candidates, Draft, Verification
from edgedec.drafter import DraftContext, Drafter, DrafterFactory, DrafterNeeds, Store
from edgedec.sampling import Noise, gumbel_of
from edgedec_methods.candidate_table import CandidateTable, context_key
from edgedec_methods.drawn.rule_tools import children_of
from edgedec_methods.recycling import RecyclingDrafter
from edgedec_methods.stand import StandDrafter
from edgedec_methods.trigram import TrigramDrafter

FACTORIES = {"recycling": RecyclingDrafter, "stand": StandDrafter, "trigram": TrigramDrafter}


@pytest.mark.parametrize("name", FACTORIES)
def test_it_begins_with_nothing(make_context: Callable[..., DraftContext], name: str) -> None:
    """It asks for eight candidates; an empty prompt, one token and a token never followed have no successor."""
    drafter = FACTORIES[name](make_context())
    assert drafter.needs == DrafterNeeds(candidates=8)
    for text in ([], [262_143], [1, 2, 3]):
        drafter.begin(text)
        assert len(drafter.propose(32, 1e18)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
@given(
    st.integers(0, 2**32), st.integers(1, 25), st.sampled_from([0.0, 1e-30, 0.7, 1.5]), st.sampled_from([None, 0, 5000])
)
def test_any_generation_is_survived(
    make_context: Callable[..., DraftContext],
    generate: Callable[[Drafter, int, int], list[Draft]],
    name: str,
    seed: int,
    n_steps: int,
    temperature: float,
    budget_bytes: int | None,
) -> None:
    """Every draft is valid and within its bounds, whatever is verified, and the same once more."""
    factory = FACTORIES[name]
    first, again = (generate(factory(make_context(temperature, budget_bytes)), seed, n_steps) for _ in range(2))
    assert [draft.tokens for draft in first] == [draft.tokens for draft in again]
    assert [draft.p_accept for draft in first] == [draft.p_accept for draft in again]


@pytest.mark.slow
@pytest.mark.parametrize("name", FACTORIES)
def test_the_store_stays_in_its_budget(budget_holds: Callable[[DrafterFactory, str], None], name: str) -> None:
    """At most half of the budget, the first context met makes room, and a smaller budget starts afresh."""
    budget_holds(FACTORIES[name], name)


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


KNOWN_PATHS = {3: 0.9, 2: 0.8, 1: 0.65}


@pytest.mark.parametrize(
    ("end", "order", "token", "share"),
    [((1, 2, 3), 3, 10, 1 / 2), ((9, 2, 3), 2, 10, 2 / 4), ((9, 9, 3), 1, 10, 2 / 5), ((7, 2, 3), 3, 11, 1 / 2)],
)
def test_the_longest_known_context_counts(
    make_context: MakeContext, end: tuple[int, ...], order: int, token: int, share: float
) -> None:
    """Three tokens where they are known together, else two, else one; n of m sightings are n / (m + 1)."""
    drafter = StandDrafter(make_context())
    drafter.begin([1, 2, 3, 10, 7, 2, 3, 11, 0, 2, 3, 10, 5, 3, 12, *end])
    draft = drafter.propose(1, 1e18)
    assert list(draft.tokens) == [token]
    assert list(draft.p_accept) == pytest.approx([KNOWN_PATHS[order] * share])


def test_a_context_at_the_start_of_the_text_is_no_other(make_context: MakeContext) -> None:
    """Token 0 before a token is not the same as no token before it."""
    drafter = StandDrafter(make_context())
    drafter.begin([5, 6])
    drafter.begin([0, 0, 5])
    assert list(drafter.propose(1, 1e18).p_accept) == pytest.approx([KNOWN_PATHS[1] / 2])
    drafter.begin([5])
    assert list(drafter.propose(1, 1e18).p_accept) == pytest.approx([KNOWN_PATHS[3] / 2])


def test_rows_are_averaged_and_the_newest_weighs_three_tenths(
    make_context: MakeContext, candidates: MakeCandidates
) -> None:
    """The mean of three rows, of which the fourth leaves seven tenths."""
    drafter = StandDrafter(make_context())
    key = context_key(1 << 40 | 2 << 20 | 3, 3)
    for p, mean in ((0.9, 0.9), (0.3, 0.6), (0.6, 0.6), (0.1, 0.45)):
        drafter.begin([1, 2, 3])
        drafter.learn(Verification((), (7,), candidates([(3, {8: p})])), {})
        assert drafter.table.row(key)[1][0] == pytest.approx(mean)


def test_a_rejected_node_teaches_its_whole_context(make_context: MakeContext, candidates: MakeCandidates) -> None:
    """A row off the path is learnt for three tokens, whoever proposed the other nodes."""
    known = []
    for verified in ([10, 11], [11], [99, 11]):
        drafter = StandDrafter(make_context())
        drafter.begin([1, 2, 3])
        drafter.learn(Verification((), (9,), candidates([(3, {10: 0.5, 11: 0.4})])), {})
        drafter.begin([1, 2, 3])
        assert {10, 11} <= set(drafter.propose(8, 1e18).tokens)
        rows = [(3, {50: 0.9}), *((token, {60 + token: 0.9}) for token in verified)]
        drafter.learn(Verification((), (50,), candidates(rows)), {})
        table = drafter.table
        known.append(tuple(bool(table.visits(context_key(2 << 40 | 3 << 20 | 11, order))) for order in (3, 2, 1)))
    assert known == [(True, True, True)] * 3


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_children_are_drawn_with_the_targets_noise(
    make_context: MakeContext, candidates: MakeCandidates, temperature: float
) -> None:
    """They come in the order of log q / T + Gumbel at their absolute position, and probabilities fall along it."""
    row = {10: 0.4, 11: 0.3, 12: 0.2, 262_143: 0.1}
    ids, q = np.array(list(row)), np.array(list(row.values()))
    picked = set()
    for length in range(3, 60):
        drafter = StandDrafter(make_context(temperature=temperature))
        drafter.begin(range(100, 100 + length))
        last = 99 + length
        drafter.learn(Verification((), (1,), candidates([(last, row)])), {})
        drafter.begin(range(100, 100 + length))
        draft = drafter.propose(16, 1e18)
        children = children_of(draft)[-1]
        keys = np.log(q) / temperature + Noise(7).gumbel(length, ids)
        tokens = [draft.tokens[node] for node in children]
        assert tokens == ids[np.argsort(-keys)].tolist()[: len(tokens)]
        p = [draft.p_accept[node] for node in children]
        assert np.all(np.diff(p) <= 0)
        assert sum(p) <= KNOWN_PATHS[3] + 1e-6
        picked.add(tokens[0])
    assert picked == set(row)


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


def test_a_pair_s_child_is_the_token_that_the_noise_picks(
    make_context: MakeContext, candidates: MakeCandidates
) -> None:
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
