"""The transformer, one row at a time: what a row sees is all that its result depends on.

Every array of a row's computation has a shape that depends on the weights and on how many tokens the row sees, and
on nothing else; the keys and values it sees are copied together in order of position. So a row has the same bits
in a chain, in a tree, alone or among others.

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
        """Make a cache of `n_ctx` slots with nothing in it."""
        shape = (hyper.n_layer, n_ctx, hyper.n_kv)
        return cls(np.zeros(shape, dtype), np.zeros(shape, dtype))

    def arrays(self) -> tuple[NDArray[np.floating], ...]:
        """Return both arrays."""
        return self.keys, self.values

    def move(self, source: NDArray[np.int32], start: int) -> None:
        """Put the slots `source` where `start` and the next ones are."""
        for array in self.arrays():
            array[:, start : start + len(source)] = array[:, source]


@dataclass(frozen=True, slots=True)
class Row:
    """One row to evaluate.

    Attributes:
        visible: int[n], slots of the tokens it sees in order of position; the last is its own.
        taps: Layers whose output to return.
        first_layer: The layer to begin with; above 0 the input is that of a forward resumed mid-stack.
        layers: Subset to run, or None.
    """

    visible: NDArray[np.intp]
    taps: tuple[int, ...] = ()
    first_layer: int = 0
    layers: LayerSet | None = None


@dataclass(frozen=True, slots=True)
class RowOutput:
    """The state after the last layer, f32[n_embd], and after each tapped one."""

    state: Floats
    tapped: Mapping[int, Floats] = field(default_factory=dict)


def evaluate(weights: Weights, cache: KVCache, state: Floats, row: Row) -> RowOutput:
    """Run the layers on one row, writing its keys and values into its slot.

    Args:
        state: f32[n_embd], the token's embedding or the hidden state to resume from.
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
    """Return f32[n_vocab] from the state after the last layer."""
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
    """Turn each pair of elements of each head by its angle at that position (Su et al. 2021).

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
