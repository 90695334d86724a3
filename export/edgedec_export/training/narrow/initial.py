"""The first weights of a narrow draft model: the target's first layers, in the widest directions of its states.

A norm's weights can be moved into the matrices behind it, after which the residual stream can be turned by any
orthonormal matrix without a change of the output (SliceGPT, Ashkboos et al. 2024, arXiv:2401.15024). The columns of
`basis` are the directions in which the target's hidden states are largest; keeping the first of them makes the model
narrow. The draft model's embedding is the target's times `enter`, and its output matrix the target's times `leave`, so
tokens that training never shows keep a place beside their like.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec_export.source import read_vector
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.narrow.shape import NarrowShape
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.weights.levels import dequantize

Floats = NDArray[np.float32]

LLAMA_LIKE = frozenset({"llama", "qwen2"})
"""Architectures whose layers are those of a llama, but for biases of q, k and v."""

_BIASES = {"q_bias": "attn_q.bias", "k_bias": "attn_k.bias", "v_bias": "attn_v.bias"}


def initial_weights(
    parts: TargetParts, shape: NarrowShape, lessons: Sequence[Lesson], seed: int, layers: Sequence[int] | None = None
) -> dict[str, Floats]:
    """Return float32 arrays: `enter` and `leave`, [target's width, width], `output_norm`, and each layer's as "0.q".

    Args:
        parts: The target.
        shape: The draft model's shape.
        lessons: Some lessons, for the hidden states.
        seed: Of random numbers.
        layers: The target's layers to begin with, one for each of the draft model's; None for the first ones. All
            layers are random where this is empty, and where the target's layers are built otherwise than a llama's.
    """
    turn = basis(lessons, parts, shape.n_embd)
    norm = math.sqrt(parts.network.n_embd / shape.n_embd)  # states that keep their length are that much larger
    weights = {
        "enter": turn * np.float32(parts.network.switches.embedding_scale),
        "leave": parts.output_norm[:, None] * turn,
        "output_norm": np.full(shape.n_embd, norm, np.float32),
    }
    chosen = range(shape.n_layer) if layers is None else layers
    if chosen and parts.network.architecture in LLAMA_LIKE:
        made = [_sliced_layer(parts, shape, layer, turn, norm) for layer in chosen]
    else:
        draw = np.random.default_rng(seed)
        made = [_random_layer(shape, draw) for _ in range(shape.n_layer)]
    for i, layer in enumerate(made):
        weights |= {f"{i}.{name}": np.ascontiguousarray(values, np.float32) for name, values in layer.items()}
    return weights


def basis(lessons: Sequence[Lesson], parts: TargetParts, width: int) -> Floats:
    """Return float32[n_embd, width], orthonormal columns: the directions in which hidden states are largest.

    The taps, the states after the last layer and the embeddings count alike, each row at length 1.
    """
    n = parts.network.n_embd
    total = np.zeros((n, n))
    taps = np.concatenate([lesson.taps[lesson.n_prompt - 1 :] for lesson in lessons])
    tokens = np.concatenate([lesson.token_ids[lesson.n_prompt :] for lesson in lessons])
    streams = [taps[:, i : i + n] for i in range(0, taps.shape[1], n)]
    for states in (*streams, np.concatenate([lesson.last for lesson in lessons]), parts.embeddings(tokens)):
        rows = states.astype(np.float32)
        rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-6)
        total += rows.T @ rows / len(rows)
    _, directions = np.linalg.eigh(total)  # the largest come last
    return np.ascontiguousarray(directions[:, ::-1][:, :width], np.float32)


def _random_layer(shape: NarrowShape, draw: np.random.Generator) -> dict[str, Floats]:
    """Return a layer that adds little to what it reads."""
    layer: dict[str, Floats] = {name: np.ones(shape.n_embd, np.float32) for name in ("attn_norm", "ffn_norm")}
    for name, (n_out, n_in) in shape.matrices().items():
        scale = (0.2 if name in ("o", "down") else 1.0) / math.sqrt(n_in)
        layer[name] = (draw.standard_normal((n_out, n_in)) * scale).astype(np.float32)
    return layer


def _sliced_layer(parts: TargetParts, shape: NarrowShape, layer: int, turn: Floats, norm: float) -> dict[str, Floats]:
    """Return a layer of the target in the directions `turn`, with the largest elements of its feed-forward block."""
    n = parts.network
    before = {
        name: read_vector(parts.gguf, f"blk.{layer}.{name}.weight")[:, None] * turn
        for name in ("attn_norm", "ffn_norm")
    }
    by_name: dict[str, Floats] = {name: np.full(shape.n_embd, norm, np.float32) for name in before}
    for name, n_heads in (("q", n.n_head), ("k", n.n_head_kv), ("v", 0)):
        matrix = _matrix(parts, f"blk.{layer}.attn_{name}.weight") @ before["attn_norm"]
        by_name[name] = _neighbours(parts, matrix, n_heads)
    for name, n_heads in (("q", n.n_head), ("k", n.n_head_kv), ("v", 0)):
        key = f"blk.{layer}.{_BIASES[f'{name}_bias']}"
        if key in parts.gguf.tensors:
            by_name[f"{name}_bias"] = _neighbours(parts, read_vector(parts.gguf, key)[:, None], n_heads)[:, 0]
    by_name["o"] = turn.T @ _matrix(parts, f"blk.{layer}.attn_output.weight")
    gate, up, down = (_matrix(parts, f"blk.{layer}.ffn_{name}.weight") for name in ("gate", "up", "down"))
    gate, up, down = gate @ before["ffn_norm"], up @ before["ffn_norm"], turn.T @ down
    sizes = np.linalg.norm(gate, axis=1) * np.linalg.norm(up, axis=1) * np.linalg.norm(down, axis=0)
    rows = np.sort(np.argsort(-sizes, kind="stable")[: shape.n_ff])
    return by_name | {"gate": gate[rows], "up": up[rows], "down": down[:, rows]}


def _neighbours(parts: TargetParts, matrix: Floats, n_heads: int) -> Floats:
    """Return q or k with the rows that are rotated together side by side, as the architecture llama has them."""
    n = parts.network
    if n.switches.rope_interleaved or not n_heads:
        return matrix
    heads = matrix.reshape(n_heads, n.head_dim, -1).copy()
    turned = heads[:, : n.n_rot].reshape(n_heads, 2, n.n_rot // 2, -1)
    heads[:, : n.n_rot] = turned.swapaxes(1, 2).reshape(n_heads, n.n_rot, -1)
    return heads.reshape(matrix.shape)


def _matrix(parts: TargetParts, name: str) -> Floats:
    tensor = parts.gguf.tensors[name]
    data = np.frombuffer(parts.gguf.read_tensor_bytes(name), np.uint8)
    return dequantize(tensor.type, data.reshape(tensor.shape[1], -1))
