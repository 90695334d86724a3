"""AdaDec against look-aheads that are written one by one, and what it reduces to."""

import math

import numpy as np
import pytest
from support.decoding.plain_texts import LENGTH, greedy, is_over, said, table_of
from support.decoding.table_branches import Ids, Table, log_law, table_texts

from edgedec.logit_ops import NUMPY_ROW_OPS, entropy_of
from edgedec_methods.adadec import LookAhead, reranked


def plain_reranked(table: Table, ahead: LookAhead) -> Ids:
    """Decode with a look-ahead at every unsure position, each from its beginning, one token a time."""
    ids: Ids = ()
    while not is_over(ids):
        order = np.argsort(-table[ids], kind="stable")
        token = int(order[0])
        if entropy_of(table[ids], NUMPY_ROW_OPS) >= ahead.entropy:
            found = dict[int, float]()
            for candidate in map(int, order[: ahead.n_candidates]):
                look = (*ids, candidate)
                while not is_over(look) and len(look) - len(ids) < ahead.n_tokens:
                    look = (*look, int(np.argmax(table[look])))
                found[candidate] = (log_law(table, look) - log_law(table, ids)) / (len(look) - len(ids))
            token = max(found, key=found.__getitem__)
        ids = (*ids, token)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ahead", [LookAhead(1.2, 3, 3), LookAhead(0.0, 2, 5), LookAhead(1.9, 4, 2)])
def test_reranked_texts_are_those_of_look_aheads_one_by_one(seed: int, ahead: LookAhead) -> None:
    """What is kept of a winner's look-ahead is what decoding on would have written."""
    texts, branches = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        found = reranked(texts, ahead)
        assert said(found) == plain_reranked(table_of(seed), ahead)
        assert found.logprob == pytest.approx(log_law(table_of(seed), said(found)), abs=1e-5)
        assert len(branches.held) == 1
    assert not branches.held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ahead", [LookAhead(math.inf), LookAhead(0.0, n_candidates=1)])
def test_without_look_aheads_it_is_greedy(seed: int, ahead: LookAhead) -> None:
    """An infinite threshold, or one candidate."""
    texts, _ = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        assert said(reranked(texts, ahead)) == greedy(table_of(seed))
