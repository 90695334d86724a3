"""The transformer, evaluated row by row: the result of a row depends on nothing but the tokens that it sees.

The shape of every array in a row's computation depends only on the weights and on the number of tokens that the row
sees, and the keys and values of these are copied together in the order of their positions. So a row has the same bits
in a chain, in a tree, alone or among other rows.

Llama (Touvron et al. 2023, arXiv:2302.13971): RMS norm (Zhang and Sennrich 2019, arXiv:1910.07467), rotary
positions (Su et al. 2021, arXiv:2104.09864), grouped-query attention (Ainslie et al. 2023, arXiv:2305.13245), SwiGLU
(Shazeer 2020, arXiv:2002.05202), experts (Shazeer et al. 2017, arXiv:1701.06538).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec.model import LayerSet
from edgedec_runtimes.architectures.architecture import Recurrence, Switches
from edgedec_runtimes.architectures.rope import Turns
from edgedec_runtimes.reference.recurrent import recur, sigmoid, silu
from edgedec_runtimes.reference.weights import Layer, Weights
from edgedec_runtimes.shared.hyperparameters import ATTENTION, CONVOLUTION, NO_MIXER, RECURRENT, Hyperparameters


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values by layer and slot.

    Attributes:
        keys, values: f16 or f32[n_layer, n_ctx, n_kv] with the largest n_kv; keys are rotated to their position.
        columns: f32[n_layer, n_ctx, n_column], what convolutions go over; f32[0, n_ctx, 0] where there are none.
        states: f32[n_layer, n_ctx, n_head, n_key, n_value], the recurrent states behind a slot's row; f32[0, n_ctx, 0,
            0, 0] where there are none.
    """

    keys: NDArray[np.floating]
    values: NDArray[np.floating]
    columns: NDArray[np.float32]
    states: NDArray[np.float32]

    @classmethod
    def empty(
        cls, hyper: Hyperparameters, recurrence: Recurrence | None, n_ctx: int, dtype: np.dtype[np.floating]
    ) -> "KVCache":
        """Return a cache of `n_ctx` slots, all zero."""
        n, r = hyper.n_layer, recurrence
        shape = (n, n_ctx, max(layer.n_kv for layer in hyper.layers))
        columns = (n, n_ctx, hyper.n_embd) if hyper.n_with(CONVOLUTION) else (0, n_ctx, 0)
        states = (0, n_ctx, 0, 0, 0)
        if r is not None:
            columns, states = (n, n_ctx, r.n_column), (n, n_ctx, r.n_head, r.n_key, r.n_value)
        return cls(
            np.zeros(shape, dtype), np.zeros(shape, dtype), np.zeros(columns, np.float32), np.zeros(states, np.float32)
        )

    def arrays(self) -> tuple[NDArray[np.floating], ...]:
        """Return the keys, the values, the columns and the states."""
        return self.keys, self.values, self.columns, self.states

    def move(self, source: NDArray[np.int32], start: int) -> None:
        """Copy the slots `source` to the slots from `start` on."""
        for array in self.arrays():
            array[:, start : start + len(source)] = array[:, source]


Floats = NDArray[np.float32]
_POST_NORM = "post_attention_norm.weight"
_LEAST_SUM = np.float32(6.103515625e-5)  # that the weights of experts are divided by


@dataclass(frozen=True, slots=True)
class Row:
    """One row to evaluate.

    Attributes:
        visible: int[n], the slots of the tokens that the row sees, in order of position; the last is its own.
        taps: Layers whose output is returned.
        first_layer: The layer to begin with; above 0 the input is the hidden state after the layer before.
        layers: The half-layers to run; None for all.
        places: int32[3], the time, height and width that it turns to; None where they are its position.
        behind: int[n], the slots of rows behind it that it sees as well.
        weights: By layer, what its attention is multiplied by in `mass`.
        mass: By layer, f32[n_head, n_slots], to which its attention is added.
    """

    visible: NDArray[np.intp]
    taps: tuple[int, ...] = ()
    first_layer: int = 0
    layers: LayerSet | None = None
    places: NDArray[np.int32] | None = None
    behind: NDArray[np.intp] = field(default_factory=lambda: np.empty(0, np.intp))
    weights: Mapping[int, float] = field(default_factory=dict)
    mass: Mapping[int, Floats] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RowOutput:
    """The hidden state after the last layer, f32[n_embd], and after each tapped layer."""

    state: Floats
    tapped: Mapping[int, Floats] = field(default_factory=dict)


def evaluate(weights: Weights, cache: KVCache, state: Floats, row: Row, per_layer: Floats | None = None) -> RowOutput:
    """Run the layers on one row, and write its keys and values to its slot of the cache.

    Args:
        cache: The session's keys and values.
        state: f32[n_embd], what enters the first layer (`embeddings`), or the hidden state to go on from; behind it may
            stand what is added to the states behind the layers from 0 on.
        row: Where the row stands, and what of it is wanted.
        per_layer: What each layer gets of the token (`per_layer_inputs`).
    """
    tapped = {}
    state, *added = np.split(state, len(state) // weights.hyper.n_embd)
    for i in range(row.first_layer, weights.hyper.n_layer):
        state = _layer(weights, cache, i, state, row, None if per_layer is None else per_layer[i])
        if i < len(added):
            state = state + added[i]
        period = weights.switches.norm_period
        if period and (i + 1) % period == 0 and i + 1 < weights.hyper.n_layer:
            state = _rms_norm(state, weights.output_norm, weights.hyper.rms_epsilon)
        if i in row.taps:
            tapped[i] = state
    return RowOutput(state, tapped)


def evaluate_together(weights: Weights, cache: KVCache, states: Floats, rows: Sequence[Row]) -> list[RowOutput]:
    """Run the layers on rows that see each other, one layer after another.

    Each layer runs twice: all keys and values have to be written before a row sees them.
    """
    tapped: list[dict[int, Floats]] = [{} for _ in rows]
    n_embd = weights.hyper.n_embd
    outputs = [state[:n_embd] for state in states]
    for i in range(weights.hyper.n_layer):
        for _ in range(2):
            rows_out = [_layer(weights, cache, i, state, row) for state, row in zip(outputs, rows, strict=True)]
        outputs = rows_out
        added = states[:, (i + 1) * n_embd : (i + 2) * n_embd]
        if added.shape[1]:
            outputs = [state + more for state, more in zip(outputs, added, strict=True)]
        for row, state, its in zip(rows, outputs, tapped, strict=True):
            if i in row.taps:
                its[i] = state
    return [RowOutput(state, its) for state, its in zip(outputs, tapped, strict=True)]


def _layer(
    weights: Weights, cache: KVCache, i: int, state: Floats, row: Row, per_layer: Floats | None = None
) -> Floats:
    """Return what leaves a layer for a row; its keys and values are written to its slot of the cache."""
    shape, entering, scale = weights.hyper.layers[i], state, np.float32(weights.switches.residual_scale)
    if shape.mixer != NO_MIXER and _mixes(row, i, shape.kv_from):
        state = state + _mixer(weights, cache, i, state, row) * scale
    elif shape.has(RECURRENT) and len(row.visible) > 1:  # the state stays as it is
        cache.states[i, row.visible[-1]] = cache.states[i, row.visible[-2]]
    if weights.hyper.has_mlp(i) and (row.layers is None or row.layers.mlp[i]):
        read = entering if weights.switches.early_router else None
        state = state + _feed_forward(weights, weights.layers[i], state, read) * scale
        state = _finished(weights, weights.layers[i], state, per_layer)
    return state


def _mixes(row: Row, layer: int, source: int) -> bool:
    """Return whether a row runs a layer's mixer: not where it leaves out the layer whose keys and values that reads."""
    if row.layers is None:
        return True
    return bool(row.layers.attn[layer] and (source < row.first_layer or row.layers.attn[source]))


def embeddings(weights: Weights, token_ids: NDArray[np.int32]) -> Floats:
    """Return f32[n, n_embd], what enters the first layer for each token."""
    return weights.embedding[token_ids] * np.float32(weights.switches.embedding_scale)


def per_layer_inputs(weights: Weights, token_id: int, state: Floats) -> Floats | None:
    """Return f32[n_layer, n_per_layer], what each layer gets of a token (Gemma 3n); None where they get nothing.

    Args:
        state: f32[n_embd], what enters the first layer.
    """
    of = weights.per_layer
    if of is None:
        return None
    n_layer, width = of.embedding.shape[1:]
    projected = (of.projection @ state * np.float32(len(state) ** -0.5)).reshape(n_layer, width)
    normed = _rms_norm(projected, of.norm, weights.hyper.rms_epsilon)
    result: Floats = (normed + of.embedding[token_id] * np.float32(width**0.5)) * np.float32(0.5**0.5)
    return result


def _finished(weights: Weights, layer: Layer, state: Floats, per_layer: Floats | None) -> Floats:
    """Return what leaves a layer: with what the layer makes of the token added, and scaled."""
    if per_layer is not None:
        made = layer["proj.weight"] @ (_gelu(layer["inp_gate.weight"] @ state) * per_layer)
        state = state + _normed(made, layer.get("post_norm.weight"), weights.hyper.rms_epsilon)
    scale = layer.get("layer_output_scale.weight")
    return state if scale is None else state * scale


def logits(weights: Weights, state: Floats) -> Floats:
    """Return the logits f32[n_vocab] for the hidden state after the last layer."""
    normed = _rms_norm(state, weights.output_norm, weights.hyper.rms_epsilon)
    return _capped(weights.output @ normed * np.float32(weights.switches.logit_scale), weights.switches.logit_softcap)


def _mixer(weights: Weights, cache: KVCache, i: int, state: Floats, row: Row) -> Floats:
    """Return what the mixer of a layer gives for a row: attention, a convolution, a recurrence, or two, added."""
    shape = weights.hyper.layers[i]
    attention = _attention(weights, cache, i, state, row) if shape.has(ATTENTION) else None
    if not shape.has(RECURRENT):
        return _convolution(weights, cache, i, state, row.visible) if attention is None else attention
    output = _recurrence(weights, cache, i, state, row.visible)
    return output if attention is None else output + attention


def _recurrence(weights: Weights, cache: KVCache, i: int, state: Floats, visible: NDArray[np.intp]) -> Floats:
    sizes, layer, slot = weights.switches.recurrence, weights.layers[i], visible[-1]
    assert sizes is not None, "the layer has a recurrent state"
    epsilon = weights.hyper.rms_epsilon
    seen = cache.columns[i, visible[-sizes.length : -1]]
    states = cache.states[i, visible[-2]] if len(visible) > 1 else np.zeros(cache.states.shape[2:], np.float32)
    x = _normed(state, layer.get("attn_norm.weight"), epsilon)
    column, states, output = recur(layer, sizes, x, (seen, states), epsilon)
    cache.columns[i, slot], cache.states[i, slot] = column, states
    return _normed(output, layer.get(_POST_NORM), epsilon)


def _attention(weights: Weights, cache: KVCache, i: int, state: Floats, row: Row) -> Floats:
    visible = row.visible
    hyper, switches, layer, shape = weights.hyper, weights.switches, weights.layers[i], weights.hyper.layers[i]
    position, slot, stored = len(visible) - 1, visible[-1], (shape.kv_from, slice(None), slice(shape.n_kv))
    x = _normed(state, layer.get("attn_norm.weight"), hyper.rms_epsilon)

    def placed(y: Floats, norm: Floats | None) -> Floats:
        """Return queries or keys, normed and rotated to the row's position, in the architecture's order."""
        if not switches.norms_after_rope:
            y = _normed_heads(y, norm, hyper)
        if layer.turns is not None:
            axes = 0 if layer.turns.axes is None else layer.turns.axes
            places = position if row.places is None else row.places[axes]
            y = _rotate(y, places, shape.head_dim, layer.turns, interleaved=switches.rope_interleaved)
        return _normed_heads(y, norm, hyper) if switches.norms_after_rope else y

    q, gate = _project(layer, "attn_q", x), None
    if switches.attention_gate:  # behind the queries of each head
        q, gate = (part.reshape(-1) for part in np.split(q.reshape(-1, 2 * shape.head_dim), 2, axis=1))
    q = placed(q, layer.get("attn_q_norm.weight"))
    if switches.temperature_tokens:
        step = position // switches.temperature_tokens
        q = q * np.float32(1 + switches.temperature_scale * math.log(1 + step))
    if "attn_k.weight" in layer.tensors:
        keys = _project(layer, "attn_k", x)
        values = _project(layer, "attn_v", x) if "attn_v.weight" in layer.tensors else keys
        if switches.value_norm:
            values = _normed_heads(values, np.ones(shape.head_dim, np.float32), hyper)
        cache.keys[stored][slot] = placed(keys, layer.get("attn_k_norm.weight"))
        cache.values[stored][slot] = values
    seen = np.concatenate([visible[-layer.window :] if layer.window else visible, row.behind])
    heads = (len(seen), shape.n_head_kv, shape.head_dim)
    keys = cache.keys[stored][seen].astype(np.float32).reshape(heads)
    values = cache.values[stored][seen].astype(np.float32).reshape(heads)
    # Each key-value head serves a group of query heads.
    grouped = q.reshape(shape.n_head_kv, -1, shape.head_dim)
    scores = grouped @ keys.transpose(1, 2, 0) * np.float32(switches.attention_scale)
    sinks = layer.get("attn_sinks.weight")
    of_groups = None if sinks is None else sinks.reshape(shape.n_head_kv, -1, 1)
    shares = _softmax(_capped(scores, switches.attention_softcap), of_groups)
    if weight := row.weights.get(i):
        row.mass[i][: shape.n_head, seen] += np.float32(weight) * shares.reshape(shape.n_head, -1)
    mixed = shares @ values.transpose(1, 0, 2)
    result = mixed.reshape(-1) if gate is None else mixed.reshape(-1) * sigmoid(gate)
    return _normed(_project(layer, "attn_output", result), layer.get(_POST_NORM), hyper.rms_epsilon)


def _convolution(weights: Weights, cache: KVCache, i: int, state: Floats, visible: NDArray[np.intp]) -> Floats:
    """Return the output of a gated short convolution (LFM2): C * conv(B * x), of three products of the state."""
    layer = weights.layers[i]
    kernels = layer["shortconv.conv.weight"]
    normed = _normed(state, layer.get("attn_norm.weight"), weights.hyper.rms_epsilon)
    c, b, x = (layer[f"shortconv.{part}.weight"] @ normed for part in ("c", "b", "x"))
    cache.columns[i, visible[-1]] = b * x
    seen = cache.columns[i, visible[-kernels.shape[1] :]]
    convolved = (seen.T * kernels[:, -len(seen) :]).sum(axis=1)
    output: Floats = layer["shortconv.out_proj.weight"] @ (c * convolved)
    return _normed(output, layer.get(_POST_NORM), weights.hyper.rms_epsilon)


def _feed_forward(weights: Weights, layer: Layer, state: Floats, routed: Floats | None) -> Floats:
    """Return what a feed-forward block adds; its router reads `routed`, or what the experts read where that is None."""
    switches, epsilon = weights.switches, weights.hyper.rms_epsilon
    x = _normed(state, layer.get("ffn_norm.weight"), epsilon)
    output, has_experts = np.zeros_like(x), "ffn_gate_inp.weight" in layer.tensors
    end = "_shexp.weight" if has_experts else ".weight"
    if f"ffn_up{end}" in layer.tensors:
        gate = layer.get(f"ffn_gate{end}")
        active = _gated(switches, None if gate is None else gate @ x, layer[f"ffn_up{end}"] @ x)
        output = layer[f"ffn_down{end}"] @ active
        if (of_shared := layer.get("ffn_gate_inp_shexp.weight")) is not None:
            output = output * sigmoid(of_shared @ x)
    if has_experts:
        norms = ("pre_ffw_norm_2.weight", "ffn_gate_inp.scale")
        to_experts, to_router = (x if (w := layer.get(n)) is None else _normed(state, w, epsilon) for n in norms)
        mixed = _experts(
            weights, layer, _project(layer, "ffn_gate_inp", to_router if routed is None else routed), to_experts
        )
        output = _normed(output, layer.get("post_ffw_norm_1.weight"), epsilon)
        output = output + _normed(mixed, layer.get("post_ffw_norm_2.weight"), epsilon)
    return _normed(output, layer.get("post_ffw_norm.weight"), epsilon)


def _gated(switches: Switches, gate: Floats | None, up: Floats) -> Floats:
    """Return the gated activations; without gates those of `up`."""
    if gate is None:
        return _ACTIVATIONS[switches.activation](up)
    if switches.glu_limit:
        limit, slope = np.float32(switches.glu_limit), np.float32(switches.glu_slope)
        gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
        return gate * sigmoid(slope * gate) * (up + np.float32(1))
    return _ACTIVATIONS[switches.activation](gate) * up


def _experts(weights: Weights, layer: Layer, gates: Floats, x: Floats) -> Floats:
    """Return the weighted sum of the outputs of the experts with the best scores `gates`, of equal ones the first."""
    switches, n_used = weights.switches, weights.hyper.n_expert_used
    if switches.expert_gating == "relu":
        gates = _rms_norm(_relu(gates), np.ones_like(gates), weights.hyper.rms_epsilon)
    elif switches.expert_gating != "chosen":
        gates = _softmax(gates) if switches.expert_gating == "softmax" else sigmoid(gates)
    bias, scales = layer.get("exp_probs_b.bias"), layer.get("ffn_down_exps.scale")
    biased = gates if bias is None else gates + bias
    chosen = np.argsort(-biased, kind="stable")[:n_used]
    shares = _softmax(gates[chosen]) if switches.expert_gating == "chosen" else gates[chosen]
    if switches.norm_experts:
        shares = shares / max(shares.sum(), _LEAST_SUM)
    if scales is not None:
        shares = shares * scales[chosen]
    output = np.zeros_like(x)
    for expert, share in zip(chosen, shares * np.float32(switches.expert_scale), strict=True):
        up = _project(layer, "ffn_up_exps", x, expert)
        gate = _project(layer, "ffn_gate_exps", x, expert) if "ffn_gate_exps.weight" in layer.tensors else None
        output = output + _project(layer, "ffn_down_exps", _gated(switches, gate, up), expert) * share
    return output


def _gelu(x: Floats) -> Floats:
    """Return the tanh form of GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415)."""
    inner = np.float32((2 / np.pi) ** 0.5) * (x + np.float32(0.044715) * x * x * x)
    result: Floats = np.multiply(np.float32(0.5) * x, np.float32(1) + np.tanh(inner))
    return result


def _relu(x: Floats) -> Floats:
    return np.maximum(x, np.float32(0))


def _relu2(x: Floats) -> Floats:
    return np.square(_relu(x))


_ACTIVATIONS = {"silu": silu, "gelu": _gelu, "relu": _relu, "relu2": _relu2}


def _capped(x: Floats, cap: float) -> Floats:
    """Return cap * tanh(x / cap); x where the cap is 0."""
    return np.tanh(x / np.float32(cap)) * np.float32(cap) if cap else x


def _project(layer: Layer, name: str, x: Floats, expert: int | None = None) -> Floats:
    """Return the product of a matrix of a layer, or of one of its experts, with its bias where it has one."""
    matrix, bias = layer[f"{name}.weight"], layer.get(f"{name}.bias")
    if expert is not None:
        matrix, bias = matrix[expert], None if bias is None else bias[expert]
    return matrix @ x if bias is None else matrix @ x + bias


def _normed(x: Floats, weight: Floats | None, epsilon: float) -> Floats:
    """Return the norm of x; x where the model has no such norm."""
    return x if weight is None else _rms_norm(x, weight, epsilon)


def _normed_heads(x: Floats, weight: Floats | None, hyper: Hyperparameters) -> Floats:
    """Return queries or keys, f32[n * head_dim], each head (or all together, by the norm's length) normalized."""
    if weight is None:
        return x
    return _rms_norm(x.reshape(-1, len(weight)), weight, hyper.rms_epsilon).reshape(-1)


def _rms_norm(x: Floats, weight: Floats, epsilon: float) -> Floats:
    """Normalize the last axis (Zhang and Sennrich 2019)."""
    result: Floats = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + np.float32(epsilon)) * weight
    return result


def _softmax(scores: Floats, sinks: Floats | None = None) -> Floats:
    """Return the softmax over the last axis; `sinks` are scores that have a part in it, and are not returned."""
    n = scores.shape[-1]
    if sinks is not None:
        scores = np.concatenate([scores, sinks], axis=-1)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    result: Floats = weights[..., :n] / weights.sum(axis=-1, keepdims=True)
    return result


def _rotate(x: Floats, places: int | NDArray[np.int32], head_dim: int, turns: Turns, *, interleaved: bool) -> Floats:
    """Return heads with each pair of their elements rotated by its angle at a position (Su et al. 2021).

    Args:
        x: f32[n * head_dim], heads one after another.
        places: The position, or int32[n_rot / 2], that of each pair.
    """
    heads = x.reshape(-1, head_dim)
    half = len(turns.frequencies)
    angles = places * turns.frequencies
    cos = (np.cos(angles) * turns.magnitude).astype(np.float32)
    sin = (np.sin(angles) * turns.magnitude).astype(np.float32)
    if interleaved:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    else:
        first, second = slice(0, half), slice(half, 2 * half)
    turned = heads.copy()
    turned[:, first] = heads[:, first] * cos - heads[:, second] * sin
    turned[:, second] = heads[:, first] * sin + heads[:, second] * cos
    return turned.reshape(-1)
