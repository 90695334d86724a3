"""The block drafter in torch: its tensors, and the states of many blocks of many texts at once.

Blocks do not see each other, so a row's attention has two parts, the context before its block and the rows of its
block up to itself, under one softmax; no mask over all blocks is made.
"""

import math
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.block.blocks import Blocks
from edgedec_export.training.network import FIRST_OUTPUT, TAP_SCALE, Tensor, Weights, folded, rms, turned, turns
from edgedec_runtimes.trained_heads.card import BlockShape, HeadCard

MARKOV_TABLE = "markov_w1"
"""A row for each token that can be drafted, and one that all others share."""


def shape_of(card: HeadCard) -> BlockShape:
    """Return the shape of the blocks of a block drafter's card."""
    assert card.block is not None, "the card is a block drafter's"
    return card.block


def new_weights(card: HeadCard, output_norm: Any, tap_scale: Any, embedding: Any, seed: int) -> Weights:
    """Return the tensors of a block drafter that has learned nothing: the context's features are the last tap, scaled.

    Args:
        card: The drafter's shape.
        output_norm: float32[n_embd], the target's.
        tap_scale: float32[n_taps * n_embd_target], the usual size of each element of the taps.
        embedding: float32[n_embd], that of a usual token, with which the rows begin that know no token.
        seed: Of the random numbers.
    """
    draw, block = torch.Generator().manual_seed(seed), shape_of(card)
    n, n_q, n_kv = card.n_embd, card.n_head * card.head_dim, card.n_head_kv * card.head_dim

    def random(n_out: int, n_in: int, scale: float) -> Tensor:
        return torch.randn(n_out, n_in, generator=draw) * scale

    wide, narrow = 1 / math.sqrt(n), 0.2 / math.sqrt(n)
    fc = random(n, len(card.taps) * card.n_embd_target, narrow)
    fc[:, -card.n_embd_target :] += torch.eye(n, card.n_embd_target)
    weights = {"fc": fc, "hidden_norm": torch.ones(n)}
    for i in range(block.n_layer):
        layer = {
            "q": random(n_q, n, wide),
            "k": random(n_kv, n, wide),
            "v": random(n_kv, n, wide),
            "o": random(n, n_q, narrow),
            "gate": random(card.n_ff, n, wide),
            "up": random(card.n_ff, n, wide),
            "down": random(n, card.n_ff, narrow),
        }
        norms = {"input_norm": n, "post_attention_norm": n, "q_norm": card.head_dim, "k_norm": card.head_dim}
        layer |= {name: torch.ones(size) for name, size in norms.items()}
        weights |= {f"layers.{i}.{name}": values for name, values in layer.items()}
    weights[MARKOV_TABLE] = random(card.n_vocab_draft + 1, block.rank, 1.0)
    weights["markov_w2"] = torch.zeros(card.n_vocab_draft, block.rank)
    extra = {"output_norm": FIRST_OUTPUT * output_norm, "mask": embedding, TAP_SCALE: tap_scale}
    return weights | {name: torch.from_numpy(np.array(values, np.float32)) for name, values in extra.items()}


def places_of(card: HeadCard, token_ids: NDArray[np.int32]) -> NDArray[np.int64]:
    """Return int64[n_vocab_target], the row of the Markov table for each token; all off the list share the last row."""
    places = np.full(card.n_vocab_target, len(token_ids))
    places[token_ids] = np.arange(len(token_ids))
    return places


def finished(card: HeadCard, weights: Weights, token_ids: NDArray[np.int32]) -> dict[str, NDArray[np.float32]]:
    """Return the tensors of a drafter that has learned: the scale of the taps in `fc`, the Markov table for all tokens.

    Args:
        card: The drafter's shape.
        weights: Its tensors while it learned.
        token_ids: int32[n_vocab_draft], the tokens that it can draft.
    """
    arrays = folded(weights)
    arrays[MARKOV_TABLE] = arrays[MARKOV_TABLE][places_of(card, token_ids)]
    return arrays


def states_of(card: HeadCard, weights: Weights, blocks: Blocks, embeddings: Tensor) -> Tensor:
    """Return [R, n_embd], the states of the blocks' rows after the last norm.

    Args:
        card: The drafter's shape.
        weights: Its tensors.
        blocks: The blocks.
        embeddings: [B, n_embd], the embeddings of the blocks' first tokens, in the order of the blocks.
    """

    def turn(positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        return turns(torch.from_numpy(positions).to(embeddings.device), card.head_dim, card.rope_base)

    taps = torch.from_numpy(blocks.taps).to(embeddings.device).float() / weights[TAP_SCALE]
    context = rms(F.linear(taps, weights["fc"]), weights["hidden_norm"], card)
    places = turn(blocks.anchors + blocks.depths), turn(blocks.positions)
    first = torch.from_numpy(blocks.depths == 0).to(embeddings.device)
    x = weights["mask"].expand(len(first), card.n_embd).clone()
    x[first] = embeddings
    for i in range(shape_of(card).n_layer):
        w = {name.removeprefix(f"layers.{i}."): values for name, values in weights.items()}
        x = x + F.linear(_attention(card, w, blocks, (rms(x, w["input_norm"], card), context), places), w["o"])
        inner = rms(x, w["post_attention_norm"], card)
        x = x + F.linear(F.silu(F.linear(inner, w["gate"])) * F.linear(inner, w["up"]), w["down"])
    return rms(x, weights["output_norm"], card)


Pair = tuple[Tensor, Tensor]


def _attention(card: HeadCard, w: Weights, blocks: Blocks, rows: Pair, places: tuple[Pair, Pair]) -> Tensor:
    """Return [R, n_head * head_dim], what the blocks' rows see of their contexts and of their blocks.

    Args:
        card: The drafter's shape.
        w: The layer's tensors.
        blocks: The blocks.
        rows: [R, n_embd], the blocks' rows, normed, and [C, n_embd], the features of the contexts.
        places: How the positions of the one and of the other turn.
    """
    d, size = card.head_dim, int(blocks.depths.max(initial=0)) + 1

    def heads(which: int, name: str) -> Tensor:
        heads_of_rows = F.linear(rows[which], w[name]).unflatten(-1, (-1, d)).transpose(0, 1)
        return heads_of_rows if name == "v" else turned(rms(heads_of_rows, w[f"{name}_norm"], card), *places[which])

    q = heads(0, "q").unflatten(0, (card.n_head_kv, -1)) / math.sqrt(d)  # [kv, groups, R, d]
    own_keys, own_values = (_moved(heads(0, name), size) for name in "kv")
    keys, values = heads(1, "k"), heads(1, "v")  # [kv, C, d]
    own_scores = torch.stack([(q * k[:, None]).sum(-1) for k in own_keys], -1)  # [kv, groups, R, size]
    outside = torch.from_numpy(np.arange(size) > blocks.depths[:, None]).to(own_scores.device)
    own_scores = own_scores.masked_fill(outside, -math.inf)
    out = []
    for span in blocks.spans:
        there, asked, n = keys[:, span.context], q[:, :, span.rows], span.context.stop - span.context.start
        far = (asked.flatten(1, 2) @ there.transpose(1, 2)).unflatten(1, asked.shape[1:3])
        later = torch.from_numpy(np.arange(n) >= blocks.anchors[span.rows, None]).to(own_scores.device)
        scores = torch.cat([far.masked_fill(later, -math.inf), own_scores[:, :, span.rows]], -1)
        share = scores.softmax(-1).to(values.dtype)
        seen = (share[..., :n].flatten(1, 2) @ values[:, span.context]).unflatten(1, asked.shape[1:3])
        near = (share[..., n + i, None] * v[:, None, span.rows] for i, v in enumerate(own_values))
        out.append(sum(near, start=seen))
    return torch.cat(out, 2).flatten(0, 1).transpose(0, 1).flatten(1)


def _moved(x: Tensor, size: int) -> list[Tensor]:
    """Return [kv, R, d] moved by 0, 1, ... size - 1 rows: row r of the last is row r - size + 1, or zeros."""
    return [F.pad(x, (0, 0, i, 0))[:, : x.shape[1]] for i in range(size)]
