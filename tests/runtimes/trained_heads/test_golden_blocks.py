"""The float64 block head computes what the classes of DSpark's authors do."""

import numpy as np
import pytest
from support.heads.golden_blocks import CARDS, NEWEST, golden, golden_head, golden_taps
from support.heads.reference_block import ReferenceBlock
from support.heads.tiny_blocks import shape_of


@pytest.mark.parametrize("name", CARDS)
def test_chains_are_those_of_deepspec(name: str) -> None:
    """Tokens, logits and confidences agree with each Markov head, to the six decimals that were stored."""
    card, expected = CARDS[name], golden(name)
    head = golden_head(card)
    own = {name: head.tensors[name].floats() for name in ("embedding", "output")}
    reference = ReferenceBlock(head, lambda tokens: own["embedding"][tokens], own["output"])
    reference.absorb(golden_taps(card))
    found = reference.draft(NEWEST, shape_of(card).n_drafts)
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logits, expected.logits, rtol=0, atol=2e-6)
    if found.sure is not None:
        sure = np.array(found.sure)
        np.testing.assert_allclose(np.log(sure / (1 - sure)), expected.sure, rtol=0, atol=2e-6)
