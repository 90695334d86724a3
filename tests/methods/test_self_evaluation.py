"""Pruning in mid-text: which texts are kept, and that they are those of their seeds; and what AUROC counts."""

import pytest
from support.decoding.plain_texts import PARAMS, said, sampled, table_of
from support.decoding.table_branches import END, table_texts

from edgedec.errors import OptionError
from edgedec_methods.judgement import Question, chance_yes
from edgedec_methods.sampled_steps import seeds_from
from edgedec_methods.self_evaluation import pruned


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_pruned_texts_are_those_of_their_seeds(seed: int) -> None:
    """The kept ones have the best judgements after so many tokens, and go on as if nothing had been judged."""
    table, question = table_of(seed), Question((2,), (1, 2), (3, 4))
    texts, branches = table_texts(table, max_tokens=4)
    with texts:
        root = texts.begin()
        live = [root, *(texts.fork(root) for _ in range(5))]
        seeds = seeds_from(seed, 6)
        begun = [sampled(table, each)[:2] for each in seeds]
        chances = [chance_yes(table[(*[t for t in ids if t != END], 2)], question) for ids in begun]
        order = sorted(range(6), key=lambda i: -chances[i])[:3]
        found, kept = pruned(texts, live, PARAMS, seeds, question, at=2, keep=3)
        assert [said(text) for text in found] == [sampled(table, seeds[i])[:4] for i in sorted(order)]
        assert kept == [chances[i] for i in sorted(order)]
        assert len(branches.held) == 3
        with pytest.raises(OptionError):
            pruned(texts, found, PARAMS, seeds, question, at=2, keep=4)
    assert not branches.held
