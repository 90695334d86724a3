"""What holds of every block head, on the float64 one: order of absorbing, who sees whom, dependence on a path."""

from typing import Any

import numpy as np
import pytest
from support.heads.reference_block import ReferenceBlock
from support.heads.tiny_blocks import CARDS, block_card, tiny_block

from edgedec_runtimes.trained_heads.card import HeadCard

N_TEXT = 9


def _opened(card: HeadCard, n_text: int = N_TEXT) -> ReferenceBlock:
    """Return a tiny head that knows a random text of n_text tokens."""
    rng = np.random.default_rng(7)
    borrowed = rng.standard_normal((card.n_vocab_target, card.n_embd))
    taps = rng.standard_normal((N_TEXT, len(card.taps) * card.n_embd_target))
    head = tiny_block(card)
    own = {name: tensor.floats() for name, tensor in head.tensors.items()}
    embedding = own.get("embedding", borrowed)
    reference = ReferenceBlock(head, lambda tokens: embedding[tokens], own.get("output", borrowed[head.d2t]))
    reference.absorb(taps[:n_text])
    return reference


@pytest.mark.parametrize("card", CARDS.values(), ids=CARDS)
def test_every_form_drafts_what_its_block_can(card: HeadCard) -> None:
    """A chain has as many rows of finite scores as the card says, and its tokens are of the head's list."""
    assert card.block is not None
    reference = _opened(card)
    drafted = reference.draft(5, card.block.n_drafts)
    assert np.isfinite(drafted.logits).all()
    assert set(drafted.tokens) <= set(reference.head.d2t.tolist())
    assert (drafted.sure is not None) == card.block.confidence
    assert len(drafted.tokens) == card.block.n_drafts


def test_pieces_and_rewinding_change_nothing() -> None:
    """A text that was absorbed in pieces, with another end in between, drafts as one absorbed at once."""
    whole, again = _opened(CARDS["two layers"]), _opened(CARDS["two layers"], n_text=4)
    rng = np.random.default_rng(7)
    rng.standard_normal((264, 32))
    taps = rng.standard_normal((N_TEXT, 96))
    again.absorb(rng.standard_normal((3, 96)))
    again.rewind(4)
    again.absorb(taps[4:])
    np.testing.assert_allclose(again.draft(5, 5).logits, whole.draft(5, 5).logits, rtol=0, atol=1e-12)


def test_a_block_needs_no_text() -> None:
    """Without features, the rows see only each other."""
    assert len(_opened(CARDS["plain"], n_text=0).draft(5, 5).tokens) == 5


@pytest.mark.parametrize(("causal", "same"), [(True, True), (False, False)])
def test_rows_of_a_causal_block_do_not_see_later_rows(causal: bool, same: bool) -> None:
    """The first two rows of a block of five are those of a block of two, if and only if the block is causal."""
    reference = _opened(block_card({"causal": causal}))
    short, whole = reference.draft(5, 2, n_rows=2).logits, reference.draft(5, 2).logits
    assert np.allclose(short, whole, rtol=0, atol=1e-12) == same


@pytest.mark.parametrize(("window", "changed", "same"), [(3, 5, True), (3, 6, False), (0, 0, False), (9, 0, False)])
def test_a_window_counts_features_before_the_anchor(window: int, changed: int, same: bool) -> None:
    """With nine features, a window of three sees those at 6, 7 and 8, from every row."""
    reference = _opened(block_card({"windows": (window,)}))
    before = reference.draft(5, 5).logits
    reference.features[changed] += 1
    after = reference.draft(5, 5).logits
    assert (after == before).all() if same else (after != before).any(axis=1).all()


@pytest.mark.parametrize(("markov", "depths"), [("none", ()), ("vanilla", (2,)), ("gated", (2,)), ("rnn", (0, 1, 2))])
def test_scores_depend_on_the_path_as_the_markov_head_says(markov: Any, depths: tuple[int, ...]) -> None:
    """Behind a path of two tokens: on the last token alone, on all from the newest on, or on none."""
    reference = _opened(block_card({"markov": markov, "rank": 0 if markov == "none" else 6}))
    path = [11, 12, 13]
    block = reference.block(path[0])
    scores = reference.logits(block, path[1:])
    for depth in range(3):
        other = [*path[:depth], 99, *path[depth + 1 :]]
        changed = reference.logits(type(block)(other[0], block.states, block.scores), other[1:])
        assert (changed != scores).any() == (depth in depths), depth


def test_an_unshifted_block_wastes_its_first_row() -> None:
    """Its drafts are rows 1 and on of the shifted block with the same weights."""
    shifted, unshifted = _opened(CARDS["plain"]), _opened(CARDS["unshifted"])
    assert (unshifted.block(5).scores == shifted.block(5).scores[1:]).all()
