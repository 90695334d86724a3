"""Tiny random block heads, in memory and as folders in the dialects of trainers."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from edgedec_runtimes.trained_heads.block_checkpoint import IN_LAYER, OUTER
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor
from edgedec_runtimes.trained_heads.shapes import expected_shapes
from support.models.hf_checkpoints import safetensors_bytes

Dialect = Literal["deepspec", "z-lab", "specforge", "liquid", "speculators"]
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
    return replace(_PLAIN, block=replace(shape_of(_PLAIN), **shape or {}), **changes)


def shape_of(card: HeadCard) -> BlockShape:
    """Return what makes a head a block head."""
    assert card.block is not None
    return card.block


_VANILLA = {"markov": "vanilla", "rank": 6}
CARDS = {
    "plain": block_card(),
    "unshifted": block_card({"shifted": False}),
    "causal": block_card({"causal": True}),
    "two layers": block_card({"n_layer": 2} | _VANILLA),
    "vanilla, unshifted": block_card({"shifted": False} | _VANILLA),
    "gated": block_card({"markov": "gated", "rank": 6}),
    "rnn": block_card({"markov": "rnn", "rank": 6, "n_layer": 2, "causal": True}),
    "confidence": block_card({"confidence": True} | _VANILLA),
    "confidence alone": block_card({"confidence": True}),
    "windows": block_card({"n_layer": 2, "windows": (3, 0)}),
    "one row": block_card({"size": 1}),
    "full vocabulary": block_card(_VANILLA, n_vocab_draft=264),
    "own output": block_card(_VANILLA, own_output=True),
    "other sizes": block_card(n_embd=24, n_head=2, head_dim=16, own_embedding=True, own_output=True),
    "mask token": block_card({"mask_token": 3}),
    "scales": block_card({"logit_scale": 0.5, "softcap": 2.0, "embedding_scale": 3.0} | _VANILLA),
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


def write_block(folder: Path, head: Head, dialect: Dialect = "deepspec", **config: Any) -> None:
    """Write a head's folder.

    Args:
        config: Overrides keys of config.json; None removes one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(block_config(head.card, dialect, **config)))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored_block(head)))


def block_config(card: HeadCard, dialect: Dialect = "deepspec", **config: Any) -> dict[str, Any]:
    """Return what config.json says of a head."""
    shape = shape_of(card)
    slides = 1 if dialect == "speculators" else 0  # how many fewer rows than features a window counts
    layers = {
        "model_type": "qwen3",
        "hidden_size": card.n_embd,
        "intermediate_size": card.n_ff,
        "num_attention_heads": card.n_head,
        "num_key_value_heads": card.n_head_kv,
        "head_dim": card.head_dim,
        "num_hidden_layers": shape.n_layer,
        "rms_norm_eps": card.rms_epsilon,
        "rope_parameters": {"rope_theta": card.rope_base, "rope_type": "default"},
        "hidden_act": "silu",
        "vocab_size": card.n_vocab_target,
        "use_sliding_window": bool(shape.windows),
        "sliding_window": max(shape.windows) + 1 - slides if shape.windows else None,
        "layer_types": [
            "sliding_attention" if shape.windows and shape.windows[i] else "full_attention"
            for i in range(shape.n_layer)
        ],
    }
    markov: dict[str, Any] = {"markov_rank": shape.rank, "enable_confidence_head": shape.confidence}
    if shape.rank:
        markov["markov_head_type"] = shape.markov
    scales = {"output_multiplier": shape.logit_scale, "final_logit_softcapping": shape.softcap}
    scales["input_embedding_scale"] = shape.embedding_scale
    where = {"mask_token_id": None if shape.mask_token < 0 else shape.mask_token}
    left = [i - 1 for i in card.taps]
    outer: dict[str, Any] = {"block_size": shape.size, "draft_vocab_size": card.n_vocab_draft}
    if dialect == "speculators":
        outer |= {"speculators_model_type": "dspark" if shape.rank else "dflash", "transformer_layer_config": layers}
        outer |= markov | where | scales | {"aux_hidden_state_layer_ids": list(card.taps)}
        outer["speculators_config"] = {"verifier": {"name_or_path": "tiny/target"}}
        outer["sliding_window_non_causal"] = not shape.causal
    elif dialect == "deepspec":
        outer |= layers | markov | where | scales | {"target_layer_ids": left, "num_anchors": 512}
        outer |= {"architectures": ["Qwen3DSparkModel"], "is_causal": shape.causal}
    else:
        nested = where | scales | {"target_layer_ids": left, "num_target_layers": 9, "causal": shape.causal}
        classes = {"z-lab": "DFlashDraftModel", "specforge": "DSparkDraftModel", "liquid": "Lfm2DSparkDraftModel"}
        outer |= layers | {"architectures": [classes[dialect]], "rope_is_neox_style": dialect != "liquid"}
        if dialect == "specforge":
            nested |= markov | {"projector_type": "dspark", "attention_mode": "gqa"}
        else:
            outer |= markov
        outer["dflash_config"] = nested
    outer["sample_from_anchor"] = shape.shifted
    return {key: value for key, value in (outer | config).items() if value is not None}


def stored_block(head: Head) -> dict[str, Any]:
    """Return name to (dtype, shape, bytes) as a checkpoint stores them."""
    outer = {short: full for full, short in OUTER.items()}
    in_layer = {short: full for full, short in IN_LAYER.items()}
    stored: dict[str, Any] = {}
    for name, tensor in head.tensors.items():
        layer, _, short = name.rpartition(".")
        full = f"{layer}.{in_layer[short]}" if layer else outer[name]
        stored[full] = ("F32", list(tensor.shape), tensor.data.tobytes())
    if head.card.n_vocab_draft < head.card.n_vocab_target:
        marked = np.zeros(head.card.n_vocab_target, np.bool_)
        marked[head.d2t] = True
        offsets = head.d2t.astype(np.int64) - np.arange(len(head.d2t))
        stored["d2t"] = ("I64", [len(offsets)], offsets.tobytes())
        stored["t2d"] = ("BOOL", [len(marked)], marked.tobytes())
    return stored
