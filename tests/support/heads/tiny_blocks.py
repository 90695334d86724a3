"""Tiny random block heads, in memory."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.shapes import expected_shapes

_PLAIN = HeadCard(
    name="tiny block",
    n_embd=32,
    n_embd_target=32,
    n_ff=64,
    n_head=4,
    n_head_kv=2,
    head_dim=8,
    rms_epsilon=1e-5,
    rope_base=5000.0,
    taps=(2, 3, 5),
    n_vocab_draft=40,
    n_vocab_target=264,
    block=BlockShape(n_layer=1, size=5, shifted=True),
)


def block_card(shape: dict[str, Any] | None = None, **changes: Any) -> HeadCard:
    """Return the card of a tiny block head.

    Args:
        shape: What of its BlockShape differs from one layer of five shifted rows.
        changes: What else of the card differs.
    """
    assert _PLAIN.block is not None
    return replace(_PLAIN, block=replace(_PLAIN.block, **shape or {}), **changes)


CARDS = {
    "plain": block_card(),
    "unshifted": block_card({"shifted": False}),
    "causal": block_card({"causal": True}),
    "two layers": block_card({"n_layer": 2, "markov": "vanilla", "rank": 6}),
    "vanilla, unshifted": block_card({"markov": "vanilla", "rank": 6, "shifted": False}),
    "gated": block_card({"markov": "gated", "rank": 6}),
    "rnn": block_card({"markov": "rnn", "rank": 6, "n_layer": 2, "causal": True}),
    "confidence": block_card({"markov": "vanilla", "rank": 6, "confidence": True}),
    "confidence alone": block_card({"confidence": True}),
    "windows": block_card({"n_layer": 2, "windows": (3, 0), "causal": True}),
    "one row": block_card({"size": 1}),
    "full vocabulary": block_card({"markov": "vanilla", "rank": 6}, n_vocab_draft=264),
    "own matrices": block_card({"markov": "vanilla", "rank": 6}, own_embedding=True, own_output=True),
    "other sizes": block_card(n_embd=24, n_head=2, head_dim=16, own_embedding=True, own_output=True),
    "mask token": block_card({"mask_token": 3}),
    "scales": block_card({"logit_scale": 0.5, "softcap": 2.0, "embedding_scale": 3.0, "markov": "vanilla", "rank": 6}),
    "five taps": block_card(taps=(1, 2, 3, 4, 6)),
}
"""Cards that differ in one of the settings each, by name."""


def tiny_block(card: HeadCard, seed: int = 0) -> Head:
    """Return a head with this card, random float32 weights, and an ascending list of tokens."""
    rng = np.random.default_rng(seed)
    tensors: dict[str, HeadTensor] = {}
    for name, shape in expected_shapes(card, n_taps=len(card.taps)).items():
        scale = 0.3 if len(shape) == 1 else 1 / math.sqrt(shape[-1])
        values = rng.standard_normal(shape) * scale + name.endswith("norm")
        tensors[name] = HeadTensor.of(values.astype(np.float32))
    ids = np.sort(rng.choice(card.n_vocab_target, card.n_vocab_draft, replace=False))
    return Head(card, tensors, ids.astype(np.int32))
