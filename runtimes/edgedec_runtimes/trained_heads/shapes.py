"""Check that a head's tensors are those that its card says."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard
from edgedec_runtimes.trained_heads.head import Head, HeadTensor

ALWAYS = ("fc", "q", "k", "v", "o", "gate", "up", "down", "input_norm", "hidden_norm", "post_attention_norm")
"""The tensors that every EAGLE-3 head has."""


def expected_shapes(card: HeadCard, *, n_taps: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a head with this card has, by name; without `rope_divisors`."""
    n = card.n_embd
    shapes: dict[str, tuple[int, ...]]
    if card.rows is not None:
        width = card.rows.n * n
        made = {"rows": (width, n), "rows_kept": (width,)} if card.rows.layer else {"rows_base": (width,)}
        return made | ({"output": (card.n_vocab_draft, n)} if card.own_output else {})
    if card.exits:
        layer = _layer_shapes(card, n_columns=n)
        shapes = {name: layer[name] for name in ("q", "k", "v", "o", "input_norm")} | {"output_norm": (n,)}
        return shapes | ({"output": (card.n_vocab_draft, n)} if card.own_output else {})
    if card.reads_target:
        width = card.n_embd_target
        return {"joint": (n, 2 * width), "fc": (width, n), "output": (card.n_vocab_draft, n)}
    shapes = {} if card.joins else {"fc": (n, n_taps * card.n_embd_target)}
    shapes["hidden_norm"] = (n,)
    if card.joins:
        shapes |= {"joint": (n, 2 * n), "input_norm": (n,)}
    elif card.block is None:
        shapes |= _layer_shapes(card, n_columns=2 * n)
    else:
        for i in range(card.block.n_layer):
            layer = _layer_shapes(card, n_columns=n) | {"q_norm": (card.head_dim,), "k_norm": (card.head_dim,)}
            for part in ("attention", "mlp") if card.block.conv_length else ():
                layer[f"{part}_conv_base"] = (2, card.block.conv_length, n)
                layer[f"{part}_conv_proj"] = (2 * card.block.conv_length * (n // card.block.conv_group), n)
            shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
        shapes |= _block_shapes(card, card.block)
    if card.norms_output and not card.joins:
        shapes["output_norm"] = (n,)
    if card.fc_norm != "none":
        shapes["fc_norm"] = (n_taps * card.n_embd_target,)
    if card.own_embedding:
        shapes["embedding"] = (card.n_vocab_target, n)
    if card.own_output:
        shapes["output"] = (card.n_vocab_draft, n)
    return shapes


def _layer_shapes(card: HeadCard, *, n_columns: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a decoder layer, whose q, k and v have n_columns."""
    n, n_q, n_kv = card.n_embd, card.n_head * card.head_dim, card.n_head_kv * card.head_dim
    return {
        "q": (n_q, n_columns),
        "k": (n_kv, n_columns),
        "v": (n_kv, n_columns),
        "o": (n, n_q),
        "gate": (card.n_ff, n),
        "up": (card.n_ff, n),
        "down": (n, card.n_ff),
        "input_norm": (n,),
        "post_attention_norm": (n,),
    }


def _block_shapes(card: HeadCard, block: BlockShape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of what a block head has beside its layers."""
    n, rank = card.n_embd, block.rank
    shapes: dict[str, tuple[int, ...]] = {}
    if block.mask_token < 0:
        shapes["mask"] = (n,)
    if block.markov == "selector":
        both = dict.fromkeys(("selector_predecessor", "selector_successor"), (card.n_vocab_target, rank))
        shapes |= both | {"selector_hidden": (rank, n)}
    elif block.markov != "none":
        shapes |= {"markov_w1": (card.n_vocab_target, rank), "markov_w2": (card.n_vocab_draft, rank)}
    if block.markov == "gated":
        shapes |= {"markov_gate": (rank, n + rank), "markov_gate_bias": (rank,)}
    if block.markov == "rnn":
        shapes |= {"markov_joint": (3 * rank, 2 * rank + n), "markov_joint_bias": (3 * rank,)}
    if block.confidence:
        shapes |= {"confidence": (1, n + rank), "confidence_bias": (1,)}
    return shapes


def checked_head(
    path: Path,
    card: HeadCard,
    tensors: Mapping[str, HeadTensor],
    d2t: NDArray[np.int64],
    *,
    n_taps: int,
    layers: GGUF | None = None,
) -> Head:
    """Return the head, after checking its tensors against its card.

    Args:
        path: The file, for messages.
        n_taps: How many taps the head has; the card may not name them yet.
        d2t: int64[n_vocab_draft], the target's token ids.
        layers: As in Head.

    Raises:
        ModelFormatError: A tensor is missing, has another shape than the card says, holds numbers that are not finite,
            or `d2t` names a token twice or one that the target does not have.
    """
    if card.block is not None:
        _check_block(path, card, card.block)
    shapes = expected_shapes(card, n_taps=n_taps)
    if "rope_divisors" in tensors:
        shapes["rope_divisors"] = (card.head_dim // 2,)
    for name, shape in shapes.items():
        if name not in tensors:
            _fail(path, f"it has no tensor for {name!r}, expected one of shape {shape}")
        if tensors[name].shape != shape:
            _fail(path, f"its tensor {name!r} has the shape {tensors[name].shape}, expected {shape}")
        if not tensors[name].is_finite():
            _fail(path, f"its tensor {name!r} holds numbers that are not finite")
    if extra := sorted(tensors.keys() - shapes.keys()):
        _fail(path, f"it has a tensor {extra[0]!r}, which its settings do not use")
    if "rope_divisors" in tensors and not (tensors["rope_divisors"].floats() > 0).all():
        _fail(path, "its rope_divisors are not all above 0")
    return Head(card, dict(tensors), checked_d2t(path, d2t, card), layers)


def complete_confidence(tensors: dict[str, HeadTensor], *, n_embd: int, rank: int) -> None:
    """Bring a confidence head to one form: its weights for an embedding that it does not see are 0, and so is its bias.

    Args:
        tensors: A head's tensors, which may have a `confidence`.
        n_embd: As in HeadCard.
        rank: As in BlockShape.
    """
    if "confidence" not in tensors:
        return
    confidence = tensors["confidence"]
    if math.prod(confidence.shape) == n_embd and rank:
        padded = np.pad(confidence.floats().reshape(1, n_embd), ((0, 0), (0, rank)))
        tensors["confidence"] = HeadTensor.of(padded)
    elif len(confidence.shape) == 1:
        tensors["confidence"] = HeadTensor((1, *confidence.shape), confidence.type, confidence.data)
    tensors.setdefault("confidence_bias", HeadTensor.of(np.zeros(1, np.float32)))


def _check_block(path: Path, card: HeadCard, block: BlockShape) -> None:
    """Refuse what no block head can be."""
    if block.n_drafts < 1:
        _fail(path, f"a block of {block.size} rows drafts nothing")
    if block.mask_token >= card.n_vocab_target:
        _fail(path, f"its mask is token {block.mask_token}, but the target has {card.n_vocab_target}")
    if block.windows and len(block.windows) != block.n_layer:
        _fail(path, f"it has {len(block.windows)} windows for {block.n_layer} layers")
    if (block.markov == "selector") != (block.top_k > 0):
        _fail(path, f"its selector scores {block.top_k} tokens")
    if block.markov == "selector" and block.shifted:
        _fail(path, "its rows predict the token behind them, expected the one at their position beside a selector")
    if block.conv_length and (block.conv_group < 1 or card.n_embd % block.conv_group):
        _fail(path, f"its convolutions have groups of {block.conv_group}, expected a divisor of {card.n_embd}")


def checked_d2t(path: Path, d2t: NDArray[np.int64], card: HeadCard) -> NDArray[np.int32]:
    """Return int32[n_vocab_draft]: the target's token ids, which must be different ones that the target has."""
    if d2t.shape != (card.n_vocab_draft,):
        _fail(path, f"d2t has the shape {d2t.shape}, expected ({card.n_vocab_draft},)")
    if d2t.size == 0 or d2t.min() < 0 or d2t.max() >= card.n_vocab_target:
        _fail(path, f"d2t names tokens beyond the target's {card.n_vocab_target}")
    if not np.diff(np.sort(d2t)).all():  # np.unique imports numpy.ma
        _fail(path, "d2t names a token twice")
    return d2t.astype(np.int32)


def _fail(path: Path, actual: str) -> NoReturn:
    raise ModelFormatError(
        f"{path}: {actual}; the head is damaged, or its settings are another head's: download it again"
    )
