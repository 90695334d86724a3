"""The transformer, evaluated row by row: the result of a row depends on nothing but the tokens that it sees.

The shape of every array in a row's computation depends only on the weights and on the number of tokens that the row
sees, and the keys and values of these are copied together in the order of their positions. So a row has the same bits
in a chain, in a tree, alone or among other rows.

Llama (Touvron et al. 2023, arXiv:2302.13971): RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), rotary
positions (Su et al. 2021, arXiv:2104.09864), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), SwiGLU
(Shazeer 2020, arXiv:2002.05202).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec.model import LayerSet
from edgedec_runtimes.reference.weights import ROPE_IS_INTERLEAVED, Layer, Weights
from edgedec_runtimes.shared.hyperparameters import Hyperparameters

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values by layer and slot.

    Attributes:
        keys, values: f16 or f32[n_layer, n_ctx, n_kv]; keys are rotated to their position.
    """

    keys: NDArray[np.floating]
    values: NDArray[np.floating]

    @classmethod
    def empty(cls, hyper: Hyperparameters, n_ctx: int, dtype: np.dtype[np.floating]) -> "KVCache":
        """Return a cache of `n_ctx` slots, all zero."""
        shape = (hyper.n_layer, n_ctx, hyper.n_kv)
        return cls(np.zeros(shape, dtype), np.zeros(shape, dtype))

    def arrays(self) -> tuple[NDArray[np.floating], ...]:
        """Return the keys and the values."""
        return self.keys, self.values

    def move(self, source: NDArray[np.int32], start: int) -> None:
        """Copy the slots `source` to the slots from `start` on."""
        for array in self.arrays():
            array[:, start : start + len(source)] = array[:, source]


@dataclass(frozen=True, slots=True)
class Row:
    """One row to evaluate.

    Attributes:
        visible: int[n], the slots of the tokens that the row sees, in order of position; the last is its own.
        taps: Layers whose output is returned.
        first_layer: The layer to begin with; above 0 the input is the hidden state after the layer before.
        layers: The half-layers to run; None for all.
    """

    visible: NDArray[np.intp]
    taps: tuple[int, ...] = ()
    first_layer: int = 0
    layers: LayerSet | None = None


@dataclass(frozen=True, slots=True)
class RowOutput:
    """The hidden state after the last layer, f32[n_embd], and after each tapped layer."""

    state: Floats
    tapped: Mapping[int, Floats] = field(default_factory=dict)


def evaluate(weights: Weights, cache: KVCache, state: Floats, row: Row) -> RowOutput:
    """Run the layers on one row, and write its keys and values to its slot of the cache.

    Args:
        state: f32[n_embd], the token's embedding, or the hidden state to go on from.
    """
    tapped = {}
    for i in range(row.first_layer, weights.hyper.n_layer):
        if row.layers is None or row.layers.attn[i]:
            state = state + _attention(weights, cache, i, state, row.visible)
        if row.layers is None or row.layers.mlp[i]:
            state = state + _feed_forward(weights, weights.layers[i], state)
        if i in row.taps:
            tapped[i] = state
    return RowOutput(state, tapped)


def logits(weights: Weights, state: Floats) -> Floats:
    """Return the logits f32[n_vocab] for the hidden state after the last layer."""
    return weights.output @ _rms_norm(state, weights.output_norm, weights.hyper.rms_epsilon)


def _attention(weights: Weights, cache: KVCache, i: int, state: Floats, visible: NDArray[np.intp]) -> Floats:
    hyper, layer = weights.hyper, weights.layers[i]
    position, slot = len(visible) - 1, visible[-1]
    x = _rms_norm(state, layer.attn_norm, hyper.rms_epsilon)
    q = _rotate(_project(layer.q, layer.q_bias, x), position, hyper)
    cache.keys[i, slot] = _rotate(_project(layer.k, layer.k_bias, x), position, hyper)
    cache.values[i, slot] = _project(layer.v, layer.v_bias, x)
    heads = (len(visible), hyper.n_head_kv, hyper.head_dim)
    keys = cache.keys[i, visible].astype(np.float32).reshape(heads)
    values = cache.values[i, visible].astype(np.float32).reshape(heads)
    # Each key-value head serves a group of query heads.
    grouped = q.reshape(hyper.n_head_kv, -1, hyper.head_dim)
    scores = grouped @ keys.transpose(1, 2, 0) * np.float32(hyper.head_dim**-0.5)
    mixed = _softmax(scores) @ values.transpose(1, 0, 2)
    result: Floats = layer.attn_output @ mixed.reshape(-1)
    return result


def _feed_forward(weights: Weights, layer: Layer, state: Floats) -> Floats:
    x = _rms_norm(state, layer.ffn_norm, weights.hyper.rms_epsilon)
    gate = layer.gate @ x
    silu = gate / (np.float32(1) + np.exp(-np.maximum(gate, np.float32(-80))))
    result: Floats = layer.down @ (silu * (layer.up @ x))
    return result


def _project(matrix: Floats, bias: Floats | None, x: Floats) -> Floats:
    return matrix @ x if bias is None else matrix @ x + bias


def _rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    result: Floats = x / np.sqrt(np.mean(x * x) + np.float32(epsilon)) * weight
    return result


def _softmax(scores: Floats) -> Floats:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Floats = weights / weights.sum(axis=-1, keepdims=True)
    return result


def _rotate(x: Floats, position: int, hyper: Hyperparameters) -> Floats:
    """Return heads with each pair of their elements rotated by its angle at `position` (Su et al. 2021).

    Args:
        x: f32[n * head_dim], heads one after another.
    """
    heads = x.reshape(-1, hyper.head_dim)
    half = hyper.n_rot // 2
    angles = position * hyper.rope_base ** (np.arange(half) * (-2.0 / hyper.n_rot))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    if ROPE_IS_INTERLEAVED[hyper.architecture]:
        first, second = slice(0, hyper.n_rot, 2), slice(1, hyper.n_rot, 2)
    else:
        first, second = slice(0, half), slice(half, hyper.n_rot)
    turned = heads.copy()
    turned[:, first] = heads[:, first] * cos - heads[:, second] * sin
    turned[:, second] = heads[:, first] * sin + heads[:, second] * cos
    return turned.reshape(-1)
