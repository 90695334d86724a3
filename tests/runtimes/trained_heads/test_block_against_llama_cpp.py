"""llama.cpp runs the block heads that edgedec writes, and its scores are those of the float64 head."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.heads.reference_block import ReferenceBlock
from support.heads.tiny_blocks import block_card, shape_of, tiny_block
from support.models.tiny_models import tiny_llama

from edgedec.gguf.file import read_gguf
from edgedec_export.head_to_gguf import write_head_gguf
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
    own = {name: head.tensors[name].floats() for name in ("embedding", "output")}
    reference = ReferenceBlock(head, lambda tokens: own["embedding"][tokens], own["output"])
    taps = np.random.default_rng(5).standard_normal((N_TEXT, len(card.taps) * 64)).astype(np.float32)
    reference.absorb(taps)
    expected = reference.draft(11, block.n_drafts)
    first = 0 if block.shifted else 1
    with LlamaBlock(path, causal=block.causal) as theirs:
        theirs.absorb(taps[:4], 0)
        theirs.block([99, *[7] * (block.size - 1)], 4)
        theirs.absorb(taps[4:], 4)
        scores, sure = theirs.block([11, *[7] * (block.size - 1)], N_TEXT)
    scores = scores[first:, head.d2t]
    np.testing.assert_allclose(scores, expected.logits, rtol=0, atol=1e-3 * np.abs(expected.logits).max())
    assert tuple(head.d2t[scores.argmax(axis=1)].tolist()) == expected.tokens
    if expected.sure is not None:
        np.testing.assert_allclose(sure[first:], expected.sure, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"mask_token": 7, "markov": "gated", "rank": 32},
        {"mask_token": 7, "markov": "rnn", "rank": 32},
        {"mask_token": 7, "confidence": True},
    ],
    ids=["mask", "gated", "rnn", "confidence"],
)
def test_llama_cpp_refuses_what_it_cannot_run(tmp_path: Path, shape: dict[str, Any]) -> None:
    """A tensor that llama.cpp has no place for keeps it from drafting wrongly."""
    target = read_gguf(tiny_llama(tmp_path / "target.gguf", n_layer=6))
    path = write_head_gguf(tiny_block(block_card(shape, **SIZES)), target, tmp_path / "head.gguf", types="F32")
    with pytest.raises(AssertionError, match="does not load"):
        LlamaBlock(path, causal=False)
