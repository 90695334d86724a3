"""The stand drafter: the longest known context counts, rows are averaged, children drawn with the target's noise."""

from collections.abc import Callable

import numpy as np
import pytest

from edgedec.draft import Candidates, Verification
from edgedec.drafter import DraftContext
from edgedec.sampling import Noise
from edgedec_methods.candidate_table import context_key
from edgedec_methods.drawn.rule_tools import children_of
from edgedec_methods.stand import StandDrafter

MakeContext = Callable[..., DraftContext]
MakeCandidates = Callable[[list[tuple[int, dict[int, float]]]], Candidates]
KNOWN = {3: 0.9, 2: 0.8, 1: 0.65}


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
    assert list(draft.p_accept) == pytest.approx([KNOWN[order] * share])


def test_a_context_at_the_start_of_the_text_is_no_other(make_context: MakeContext) -> None:
    """Token 0 before a token is not the same as no token before it."""
    drafter = StandDrafter(make_context())
    drafter.begin([5, 6])
    drafter.begin([0, 0, 5])
    assert list(drafter.propose(1, 1e18).p_accept) == pytest.approx([KNOWN[1] / 2])
    drafter.begin([5])
    assert list(drafter.propose(1, 1e18).p_accept) == pytest.approx([KNOWN[3] / 2])


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
        assert sum(p) <= KNOWN[3] + 1e-6
        picked.add(tokens[0])
    assert picked == set(row)
