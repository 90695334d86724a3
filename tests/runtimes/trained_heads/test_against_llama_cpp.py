"""llama.cpp runs the heads that edgedec writes, and its drafts are those of the numpy and the float64 head."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.heads.reference_block import NOT_SELECTED, ReferenceBlock
from support.heads.reference_head import ReferenceHead
from support.heads.tiny_blocks import block_card, shape_of, tiny_block
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import tiny_llama

from edgedec.gguf.file import read_gguf
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_export.target_rows import EMBEDDING, output_name, read_rows
from edgedec_runtimes.trained_heads.card import HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.load import load_head

pytest.importorskip("llama_cpp", reason="llama-cpp-python, of the extra `llamacpp`, is not installed")

from support.heads.llama_head import LlamaBlock, LlamaHead

pytestmark = pytest.mark.slow


SIZES: dict[str, Any] = {"n_embd": 64, "n_embd_target": 64, "head_dim": 16, "taps": (2, 3, 4), "n_vocab_target": 260}
N_TEXT = 8


@pytest.mark.skipif(not LlamaHead.available(), reason="the library has no names as gcc gives them")
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    ("change", "own_output"),
    [
        ({}, False),
        ({}, True),
        ({"norm_before_residual": True, "fc_norm": "joined"}, True),
        ({"own_embedding": True, "own_output": True}, False),
        ({"config": {"rope_scaling": {"type": "linear", "factor": 4.0}}, "n_head": 2, "n_head_kv": 1}, True),
    ],
)
def test_llama_cpp_computes_the_same(tmp_path: Path, change: dict[str, Any], own_output: bool, tied: bool) -> None:
    """Features, states and logits of a text and of a chain of four agree; so do the drafted tokens."""
    target_path = tiny_llama(tmp_path / "target.gguf", n_layer=6, tied=tied)
    target = read_gguf(target_path)
    write_head(tmp_path / "head", TinyHead(**SIZES | change))
    source = load_head(tmp_path / "head")
    path = write_head_gguf(source, target, tmp_path / "head.gguf", types="F32", own_output=own_output)
    head = load_head(path)
    rows = head.tensors["output"].floats() if head.card.own_output else read_rows(target, output_name(target), head.d2t)
    own = head.tensors["embedding"].floats() if head.card.own_embedding else None
    reference = ReferenceHead(
        head, partial(read_rows, target, EMBEDDING) if own is None else lambda tokens: own[tokens], rows
    )
    rng = np.random.default_rng(5)
    taps = rng.standard_normal((N_TEXT - 1, 192)).astype(np.float32)
    text = rng.integers(0, 260, N_TEXT).tolist()
    reference.absorb(taps)
    drafted, expected = reference.draft(text, 4)
    borrows = not (head.card.own_output and head.card.own_embedding)
    with LlamaHead(path, target_path if borrows else None) as theirs:
        features = theirs.fuse(taps)
        np.testing.assert_allclose(features, reference.features, rtol=0, atol=2e-4 * np.abs(features).max())
        tokens, states = text[1:], features
        for i in range(4):
            position = 0 if i == 0 else N_TEXT - 2 + i
            logits, states = theirs.step(tokens, states, position)
            np.testing.assert_allclose(
                logits[-1, head.d2t], expected[i], rtol=0, atol=1e-3 * np.abs(expected).max(), err_msg=f"token {i}"
            )
            assert int(head.d2t[logits[-1, head.d2t].argmax()]) == drafted[i]
            tokens, states = [drafted[i]], states[-1:]


BLOCK_SIZES: dict[str, Any] = SIZES | {"own_embedding": True, "own_output": True}
N_BLOCK_TEXT = 9
VANILLA = {"markov": "vanilla", "rank": 32}
DFLASH2 = {"shifted": False, "markov": "selector", "rank": 32, "top_k": 6, "conv_length": 2, "conv_group": 16}


def _taps(card: HeadCard) -> NDArray[np.float32]:
    return np.random.default_rng(5).standard_normal((N_BLOCK_TEXT, len(card.taps) * 64)).astype(np.float32)


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
        return theirs.block([11, *[7] * (block.size - 1)], N_BLOCK_TEXT)


@pytest.mark.skipif(not LlamaBlock.available(), reason="the library has no names as gcc gives them")
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
    card = block_card(DFLASH2 | shape | {"mask_token": 7}, **BLOCK_SIZES | changes)
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


@pytest.mark.skipif(not LlamaBlock.available(), reason="the library has no names as gcc gives them")
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
def test_llama_cpp_computes_the_same_blocks(tmp_path: Path, shape: dict[str, Any], changes: dict[str, Any]) -> None:
    """Scores and confidences of a chain agree, behind a text that was absorbed in two parts; so do the tokens."""
    target = read_gguf(tiny_llama(tmp_path / "target.gguf", n_layer=6))
    card = block_card(shape | {"mask_token": 7}, **BLOCK_SIZES | changes)
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


@pytest.mark.skipif(not LlamaBlock.available(), reason="the library has no names as gcc gives them")
@pytest.mark.parametrize(
    "shape",
    [
        {},
        *({"mask_token": 7, "markov": markov, "rank": 32} for markov in ("gated", "rnn")),
        {"mask_token": 7, "confidence": True},
        {"mask_token": 7, "conv_length": 2, "conv_group": 16},
        DFLASH2 | {"mask_token": 7, "conv_length": 0},
    ],
    ids=["mask", "gated", "rnn", "confidence", "convolutions alone", "selector alone"],
)
def test_llama_cpp_refuses_what_it_cannot_run(tmp_path: Path, shape: dict[str, Any]) -> None:
    """A tensor that llama.cpp has no place for keeps it from drafting wrongly."""
    target = read_gguf(tiny_llama(tmp_path / "target.gguf", n_layer=6))
    path = write_head_gguf(tiny_block(block_card(shape, **BLOCK_SIZES)), target, tmp_path / "head.gguf", types="F32")
    with pytest.raises(AssertionError, match="does not load"):
        LlamaBlock(path, causal=False)
