"""The slow heads that others are compared with compute what the formulas say, and what the authors' classes do.

What holds of every block head is tested on the float64 one: order of absorbing, who sees whom, dependence on a path.
"""

import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.reference_block import NOT_SELECTED, ReferenceBlock
from support.heads.reference_head import ReferenceHead
from support.heads.tiny_blocks import CARDS, block_card, shape_of, tiny_block
from support.heads.tiny_heads import KINDS as HEAD_KINDS
from support.heads.tiny_heads import TinyHead, oracle_logits, write_head

from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.load import load_head
from edgedec_runtimes.trained_heads.shapes import expected_shapes

N_TEXT = 9


def _head(folder: Path, tiny: TinyHead) -> tuple[ReferenceHead, dict[str, np.ndarray], np.ndarray, np.ndarray]:
    weights = write_head(folder, tiny)
    rng = np.random.default_rng(7)
    borrowed = rng.standard_normal((tiny.n_vocab_target, tiny.n_embd)).astype(np.float32)
    taps = rng.standard_normal((N_TEXT - 1, len(tiny.taps) * tiny.n_embd_target)).astype(np.float32)
    head = load_head(folder)
    embedding = weights.get("embedding", borrowed)
    output = weights.get("output", borrowed[head.d2t])
    return ReferenceHead(head, lambda tokens: embedding[tokens], output), weights, borrowed, taps


@pytest.mark.slow
@pytest.mark.parametrize("tiny", HEAD_KINDS.values(), ids=HEAD_KINDS)
def test_logits_are_those_of_the_formulas(tmp_path: Path, tiny: TinyHead) -> None:
    """A chain of four after a text has the logits of a float64 forward of one pair after another."""
    reference, weights, borrowed, taps = _head(tmp_path, tiny)
    text = np.random.default_rng(8).integers(0, tiny.n_vocab_target, N_TEXT).tolist()
    reference.absorb(taps)
    drafted, logits = reference.draft(text, 4)
    expected = oracle_logits(tiny, weights, borrowed, taps, text, drafted[:3])
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    assert drafted == [int(reference.head.d2t[row.argmax()]) for row in expected]


@pytest.mark.slow
def test_pieces_and_rewinding_change_no_chain(tmp_path: Path) -> None:
    """Absorbing in pieces, drafting in between and forgetting tokens lead to the same drafts as absorbing at once."""
    reference, _, _, taps = _head(tmp_path, TinyHead())
    text = list(range(10, 10 + N_TEXT))
    reference.absorb(taps)
    whole = reference.draft(text, 3)
    again, _, _, _ = _head(tmp_path, TinyHead())
    again.absorb(taps[:3])
    again.draft(text[:4], 2)
    again.absorb(taps[3:6])
    again.draft([*text[:6], 99], 2)
    again.rewind(5)
    again.absorb(taps[5:])
    tokens, logits = again.draft(text, 3)
    assert tokens == whole[0]
    np.testing.assert_allclose(logits, whole[1], rtol=0, atol=1e-5)


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


def test_convolutions_read_rows_before_their_own() -> None:
    """Of a causal block with convolutions, the first two rows are those of a block of two; the kernels are heeded."""
    shape = {"causal": True, "conv_length": 3, "conv_group": 4}
    reference, plain = _opened(block_card(shape)), _opened(block_card({"causal": True}))
    short, whole = reference.draft(5, 2, n_rows=2).logits, reference.draft(5, 2).logits
    assert np.allclose(short, whole, rtol=0, atol=1e-12)
    for part in ("attention", "mlp"):
        base = np.zeros((2, 3, 32))
        base[:, 0] = 1  # each row as it is
        reference.weights[f"layers.0.{part}_conv_base"] = base
        reference.weights[f"layers.0.{part}_conv_proj"] *= 0
    plain.weights |= {name: values for name, values in reference.weights.items() if "_conv_" not in name}
    assert np.allclose(reference.block(5).states, plain.block(5).states, rtol=0, atol=1e-12)


def test_a_selector_scores_the_best_tokens_alone() -> None:
    """What the output matrix makes of these and how they follow the token before are added."""
    reference = _opened(CARDS["selector"])
    block = reference.block(5)
    best = np.sort(np.argsort(-block.scores[1])[:7])
    row, w = reference.logits(block, [11]), reference.weights
    assert (np.flatnonzero(row > NOT_SELECTED) == best).all()
    gate = w["selector_hidden"] @ block.states[1]
    for i in best:
        follows = (w["selector_predecessor"][11] * gate * w["selector_successor"][reference.head.d2t[i]]).sum()
        assert row[i] == pytest.approx(block.scores[1][i] + follows, abs=1e-12)


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


@pytest.mark.parametrize(
    ("markov", "depths"), [("none", ()), ("vanilla", (2,)), ("gated", (2,)), ("rnn", (0, 1, 2)), ("selector", (2,))]
)
def test_scores_depend_on_the_path_as_the_markov_head_says(markov: Any, depths: tuple[int, ...]) -> None:
    """Behind a path of two tokens: on the last token alone, on all from the newest on, or on none."""
    top_k = 7 if markov == "selector" else 0
    reference = _opened(block_card({"markov": markov, "rank": 0 if markov == "none" else 6, "top_k": top_k}))
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
    np.testing.assert_allclose(unshifted.block(5).scores, shifted.block(5).scores[1:], rtol=1e-12, atol=1e-12)


MARKOV = {"mask_token": 3, "rank": 6, "confidence": True}
GOLDEN: dict[str, dict[str, Any]] = {
    "none": {"n_layer": 2, "mask_token": 3},
    "vanilla": {"n_layer": 2, "markov": "vanilla", **MARKOV},
    "gated": {"markov": "gated", **MARKOV},
    "rnn": {"markov": "rnn", **MARKOV},
}


def _waves(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Return numbers from -1 to 1 without a pattern that matters, the same on every machine but for rounding."""
    index = np.arange(int(np.prod(shape)), dtype=np.float64)
    return np.sin(zlib.crc32(name.encode()) % 1000 + 0.1 * index * (index % 97 + 1)).reshape(shape)


@pytest.mark.parametrize("name", GOLDEN)
def test_chains_are_those_of_deepspec(name: str) -> None:
    """Tokens, logits and confidences agree with each Markov head, to the six decimals that were stored.

    Weights and taps are waves; what DeepSpec drafts (program at 67b59fb8) is a chain behind token 5 of seven tokens.
    """
    expected = json.loads(Path(__file__).with_name("golden_blocks.json").read_text())[name]
    card = block_card(GOLDEN[name], n_vocab_target=48, n_vocab_draft=48, own_embedding=True, own_output=True)
    tensors = {}
    for part, shape in expected_shapes(card, n_taps=len(card.taps)).items():
        scale = 0.3 if len(shape) == 1 else 1.7 / np.sqrt(shape[-1])
        tensors[part] = HeadTensor.of((_waves(part, shape) * scale + part.endswith("norm")).astype(np.float32))
    head = Head(card, tensors, np.arange(card.n_vocab_draft, dtype=np.int32))
    embedding = tensors["embedding"].floats()
    reference = ReferenceBlock(head, lambda tokens: embedding[tokens], tensors["output"].floats())
    reference.absorb(_waves("taps", (7, len(card.taps) * card.n_embd_target)).astype(np.float32))
    found = reference.draft(5, shape_of(card).n_drafts)
    assert list(found.tokens) == expected["tokens"]
    np.testing.assert_allclose(found.logits, expected["logits"], rtol=0, atol=2e-6)
    assert (found.sure is None) == (not expected["sure"])
    if found.sure is not None:
        sure = np.array(found.sure)
        np.testing.assert_allclose(np.log(sure / (1 - sure)), expected["sure"], rtol=0, atol=2e-6)
