"""Beam searches against plain forms: one that tries everything, greedy decoding, and diverse groups."""

import numpy as np
import pytest
from support.decoding.plain_texts import said
from support.decoding.table_branches import END, Ids, Table, log_law, random_table, table_texts, whole_texts

from edgedec_methods.beam import beam_search
from edgedec_methods.diverse_beams import diverse_beams

N_VOCAB, LENGTH = 4, 4


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
    table = random_table(seed, n_vocab=N_VOCAB, length=LENGTH)
    texts, _ = table_texts(table, max_tokens=LENGTH)
    ids: Ids = ()
    while len(ids) < LENGTH and (not ids or ids[-1] != END):
        ids = (*ids, int(np.argmax(table[ids])))
    with texts:
        assert [said(beam.text) for beam in beam_search(texts, 1)] == [ids]
        assert texts.n_tokens == sum(texts.forwards.values()) == len([token for token in ids if token != END])


N_VOCAB, LENGTH = 4, 4


def plain_diverse(table: Table, width: int, n_groups: int, penalty: float, length_penalty: float) -> list[list[Ids]]:
    """Search without forks: every score is computed anew, text by text and token by token."""
    groups: list[dict[Ids, float]] = [{(): 0.0} for _ in range(n_groups)]
    for length in range(LENGTH):
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
    table = random_table(seed, n_vocab=N_VOCAB, length=LENGTH)
    texts, branches = table_texts(table, max_tokens=LENGTH)
    with texts:
        found = diverse_beams(texts, width * n_groups, n_groups=n_groups, penalty=penalty)
        expected = plain_diverse(table, width, n_groups, penalty, 1.0)
        assert [said(beam.text) for beam in found] == [ids for group in expected for ids in group]
    assert not branches.held


@pytest.mark.parametrize("seed", range(6))
def test_without_a_penalty_each_group_is_a_beam_search(seed: int) -> None:
    """Lambda 0 makes every group the plain beam search of its width."""
    table = random_table(seed, n_vocab=N_VOCAB, length=LENGTH)
    alone, grouped = table_texts(table, max_tokens=LENGTH)[0], table_texts(table, max_tokens=LENGTH)[0]
    with alone, grouped:
        plain = [said(beam.text) for beam in beam_search(alone, 3)]
        assert [said(beam.text) for beam in diverse_beams(grouped, 9, n_groups=3, penalty=0.0)] == plain * 3


def test_a_penalty_makes_groups_differ() -> None:
    """With a large lambda no two groups begin with the same token; with 0 they all do."""
    table = random_table(3, n_vocab=N_VOCAB, length=LENGTH)
    for penalty, n_first in ((0.0, 1), (50.0, 4)):
        texts, _ = table_texts(table, max_tokens=LENGTH)
        with texts:
            found = diverse_beams(texts, 4, n_groups=4, penalty=penalty)
            assert len({said(beam.text)[0] for beam in found}) == n_first
