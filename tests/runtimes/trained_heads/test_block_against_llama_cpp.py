"""llama.cpp runs the block heads that edgedec writes, and its scores are those of the float64 head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.heads.reference_block import NOT_SELECTED, ReferenceBlock
from support.heads.tiny_blocks import block_card, shape_of, tiny_block
from support.models.tiny_models import tiny_llama

from edgedec.gguf.file import read_gguf
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.load import load_head

pytest.importorskip("llama_cpp", reason="llama-cpp-python, of the extra `llamacpp`, is not installed")

from support.heads.llama_block import LlamaBlock

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not LlamaBlock.available(), reason="the library has no names as gcc gives them"),
]

SIZES: dict[str, Any] = {"n_embd": 64, "n_embd_target": 64, "head_dim": 16, "taps": (2, 3, 4), "n_vocab_target": 260}
SIZES |= {"own_embedding": True, "own_output": True}
N_TEXT = 9
VANILLA = {"markov": "vanilla", "rank": 32}
DFLASH2 = {"shifted": False, "markov": "selector", "rank": 32, "top_k": 6, "conv_length": 2, "conv_group": 16}


def _taps(card: HeadCard) -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal((N_TEXT, len(card.taps) * 64)).astype(np.float32)


def _reference(head: Head) -> ReferenceBlock:
    own = {name: head.tensors[name].floats() for name in ("embedding", "output")}
    reference = ReferenceBlock(head, lambda tokens: own["embedding"][tokens], own["output"])
    reference.absorb(_taps(head.card))
    return reference


def _theirs(path: Path, card: HeadCard) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return what llama.cpp makes of a block behind token 11, after the text was absorbed in two parts."""
    block, taps = shape_of(card), _taps(card)
    with LlamaBlock(path, causal=block.causal) as theirs:
        theirs.absorb(taps[:4], 0)
        theirs.block([99, *[7] * (block.size - 1)], 4)
        theirs.absorb(taps[4:], 4)
        return theirs.block([11, *[7] * (block.size - 1)], N_TEXT)


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({}, {}),
        ({"n_layer": 2, "causal": True, "conv_length": 3, "conv_group": 4}, {"n_vocab_draft": 260}),
        ({"logit_scale": 0.5, "softcap": 2.0, "embedding_scale": 3.0, "conv_length": 1}, {}),
    ],
)
def test_llama_cpp_computes_the_same_lattice(tmp_path: Path, shape: dict[str, Any], changes: dict[str, Any]) -> None:
    """A selector's scores agree for the best tokens of all rows, along the chain of the most probable ones."""
    target = read_gguf(tiny_llama(tmp_path / "target.gguf", n_layer=6))
    card = block_card(DFLASH2 | shape | {"mask_token": 7}, **SIZES | changes)
    path = write_head_gguf(tiny_block(card), target, tmp_path / "head.gguf", types="F32")
    head, k = load_head(path), 6
    reference = _reference(head)
    block, chain, before = reference.block(11), list[int](), 0
    for row in _theirs(path, card)[1][1:]:
        tokens, scores = row[:k].astype(np.int64), row[k : k + k * k].reshape(k, k)[before]
        logits = reference.logits(block, chain)
        expected = logits[np.searchsorted(head.d2t, tokens)]
        np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
        assert (np.sort(tokens) == head.d2t[logits > NOT_SELECTED]).all()
        before = int(scores.argmax())
        chain.append(int(tokens[before]))
    assert tuple(chain) == reference.draft(11, 4).tokens


@pytest.mark.parametrize(
    ("shape", "changes"),
    [
        ({"shifted": False}, {}),
        ({"shifted": False, "n_layer": 2, "causal": True}, {"n_vocab_draft": 260}),
        (VANILLA, {}),
        (VANILLA | {"n_layer": 2, "confidence": True, "causal": True}, {}),
        (VANILLA | {"shifted": False, "confidence": True}, {"n_vocab_draft": 260}),
        (VANILLA | {"embedding_scale": 3.0}, {"taps": (1, 2, 3, 4, 5)}),
        ({"windows": (3,), "size": 1}, {}),
    ],
)
def test_llama_cpp_computes_the_same(tmp_path: Path, shape: dict[str, Any], changes: dict[str, Any]) -> None:
    """Scores and confidences of a chain agree, behind a text that was absorbed in two parts; so do the tokens."""
    target = read_gguf(tiny_llama(tmp_path / "target.gguf", n_layer=6))
    card = block_card(shape | {"mask_token": 7}, **SIZES | changes)
    source = tiny_block(card)
    divisors = HeadTensor.of(np.linspace(1, 4, 8, dtype=np.float32))
    source = Head(card, {**source.tensors, "rope_divisors": divisors}, source.d2t)
    path = write_head_gguf(source, target, tmp_path / "head.gguf", types="F32")
    head, block = load_head(path), shape_of(card)
    expected = _reference(head).draft(11, block.n_drafts)
    first = 0 if block.shifted else 1
    scores, beside = _theirs(path, card)
    scores = scores[first:, head.d2t]
    np.testing.assert_allclose(scores, expected.logits, rtol=0, atol=1e-3 * np.abs(expected.logits).max())
    assert tuple(head.d2t[scores.argmax(axis=1)].tolist()) == expected.tokens
    if expected.sure is not None:
        np.testing.assert_allclose(beside[first:, 0], expected.sure, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"mask_token": 7, "markov": "gated", "rank": 32},
        {"mask_token": 7, "markov": "rnn", "rank": 32},
        {"mask_token": 7, "confidence": True},
        {"mask_token": 7, "conv_length": 2, "conv_group": 16},
        DFLASH2 | {"mask_token": 7, "conv_length": 0},
    ],
    ids=["mask", "gated", "rnn", "confidence", "convolutions alone", "selector alone"],
)
def test_llama_cpp_refuses_what_it_cannot_run(tmp_path: Path, shape: dict[str, Any]) -> None:
    """A tensor that llama.cpp has no place for keeps it from drafting wrongly."""
    target = read_gguf(tiny_llama(tmp_path / "target.gguf", n_layer=6))
    path = write_head_gguf(tiny_block(block_card(shape, **SIZES)), target, tmp_path / "head.gguf", types="F32")
    with pytest.raises(AssertionError, match="does not load"):
        LlamaBlock(path, causal=False)
