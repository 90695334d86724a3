"""Beam search against a search that tries everything, and a beam of one against greedy decoding."""

import numpy as np
import pytest
from support.decoding.plain_texts import said
from support.decoding.table_branches import END, Ids, random_table, table_texts, whole_texts

from edgedec_methods.beam import beam_search

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
