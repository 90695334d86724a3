"""The two halves of a layer as ONNX nodes, attention and feed-forward; each maps hidden states to hidden states.

The base is Llama (Touvron et al. 2023, arXiv:2302.13971); what other architectures add are the switches of
edgedec_runtimes.architectures.architecture, and norms and biases that a file may have.
"""

from dataclasses import dataclass

import numpy as np

from edgedec_export.onnx_graph.file_weights import FileWeights
from edgedec_export.onnx_graph.parts import Scope
from edgedec_runtimes.cpu.network import Network


@dataclass(frozen=True, slots=True)
class Inputs:
    """Names of the values that attention reads beside the hidden state.

    Attributes:
        cos, sin: float32[S, n_rot/2] for the positions of the rows.
        bias: float32[1, 1, A, T], which is added to the scores.
        past_key, past_value: The KV cache, [1, n_head_kv, C, head_dim] each.
        n_rows: int64[1], S.
        temperature: float32[1, S, 1] that queries are multiplied by; None where they are not.
    """

    cos: str
    sin: str
    bias: str
    past_key: str
    past_value: str
    n_rows: str
    temperature: str | None = None


@dataclass(frozen=True, slots=True)
class Builder:
    """What all layers share: the network's shape, and its weights."""

    network: Network
    weights: FileWeights


def attention(b: Builder, scope: Scope, layer: int, state: str, inputs: Inputs) -> list[str]:
    """Add the attention half of a layer.

    Returns:
        Names of the new hidden state, of the layer's keys and of its values.
    """
    p, n = f"blk.{layer}", b.network
    x = _norm(b, scope, f"{p}.attn_norm.weight", state)
    q = _heads(b, scope, layer, "attn_q", x, inputs)
    k = _heads(b, scope, layer, "attn_k", x, inputs)
    v = _projection(b, scope, f"{p}.attn_v", x)
    if inputs.temperature is not None:
        q = scope.add("Mul", [q, inputs.temperature], "attn_q_sharpened")
    q, k, v = (scope.add("Gather", [x, "attention_rows"], f"{x.split('/')[-1]}_rows", axis=1) for x in (q, k, v))
    mixed, key, value = scope.add_many(
        "GroupQueryAttention",
        [q, k, v, inputs.past_key, inputs.past_value, "seqlens_k", "total_sequence_length", "", "", "", inputs.bias],
        ["attention", "key", "value"],
        num_heads=n.n_head,
        kv_num_heads=n.n_head_kv,
        scale=n.switches.attention_scale,
        softcap=n.switches.attention_softcap,
    )
    first, axis = (b.weights.initializers.add(name, np.array([i], np.int64)) for i, name in enumerate(("zero", "one")))
    mixed = scope.add("Slice", [mixed, first, inputs.n_rows, axis], "attention_own_rows")
    y = _projection(b, scope, f"{p}.attn_output", mixed)
    return [_added(b, scope, f"{p}.post_attention_norm.weight", state, y), key, value]


def feed_forward(b: Builder, scope: Scope, layer: int, state: str) -> str:
    """Add the feed-forward half of a layer (Shazeer 2020, arXiv:2002.05202); return the new hidden state's name."""
    p = f"blk.{layer}"
    x = _norm(b, scope, f"{p}.ffn_norm.weight", state)
    gate = b.weights.linear(scope, f"{p}.ffn_gate.weight", x)
    up = b.weights.linear(scope, f"{p}.ffn_up.weight", x)
    if b.network.switches.activation == "gelu":
        active = scope.add("Gelu", [gate], "gelu", approximate="tanh")
    else:
        active = scope.add("QuickGelu", [gate], "silu", alpha=1.0)  # x * sigmoid(alpha * x)
    y = b.weights.linear(scope, f"{p}.ffn_down.weight", scope.add("Mul", [active, up], "gated"))
    return _added(b, scope, f"{p}.post_ffw_norm.weight", state, y)


def rms_norm(b: Builder, scope: Scope, weight: str, x: str, name: str) -> str:
    """Add an RMS norm over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467); return the result's name."""
    inputs = [x, b.weights.vector(weight)]
    return scope.add("SimplifiedLayerNormalization", inputs, name, axis=-1, epsilon=b.network.rms_epsilon)


def _norm(b: Builder, scope: Scope, weight: str, x: str) -> str:
    """Add a norm; return x where the model has no such norm."""
    if not b.weights.has(weight):
        return x
    return rms_norm(b, scope, weight, x, weight.split(".")[-2])


def _added(b: Builder, scope: Scope, post_norm: str, state: str, y: str) -> str:
    """Add the result y of a half-layer, normalized and scaled where the architecture does that, to the hidden state."""
    y, scale = _norm(b, scope, post_norm, y), b.network.switches.residual_scale
    if scale != 1.0:
        y = scope.add("Mul", [y, b.weights.initializers.add("residual_scale", np.array(scale, np.float32))], "scaled")
    return scope.add("Add", [state, y], "state")


def _projection(b: Builder, scope: Scope, name: str, x: str) -> str:
    y = b.weights.linear(scope, f"{name}.weight", x)
    if b.weights.has(f"{name}.bias"):
        y = scope.add("Add", [y, b.weights.vector(f"{name}.bias")], f"{name.split('.')[-1]}_biased")
    return y


def _heads(b: Builder, scope: Scope, layer: int, short: str, x: str, inputs: Inputs) -> str:
    """Add queries ("attn_q") or keys ("attn_k") with their norm and rotation, float32[1, S, n_head * head_dim]."""
    switches, name = b.network.switches, f"blk.{layer}.{short}"
    n_head = b.network.n_head if short == "attn_q" else b.network.n_head_kv
    y = _projection(b, scope, name, x)
    if not switches.norms_after_rope:
        y = _normed_heads(b, scope, name, y, n_head)
    if switches.rotates(layer):
        y = _rotated(b, scope, y, inputs, n_head, short)
    return _normed_heads(b, scope, name, y, n_head) if switches.norms_after_rope else y


def _normed_heads(b: Builder, scope: Scope, name: str, y: str, n_head: int) -> str:
    """Add the norm of queries or keys where there is one: of each head or of all together."""
    if not b.weights.has(f"{name}_norm.weight"):
        return y
    short, dim = name.split(".")[-1], b.network.head_dim
    if b.network.switches.wide_norms:
        return rms_norm(b, scope, f"{name}_norm.weight", y, f"{short}_norm")
    y = scope.add("Reshape", [y, _shape(b, dim)], f"{short}_heads")
    y = rms_norm(b, scope, f"{name}_norm.weight", y, f"{short}_norm")
    return scope.add("Reshape", [y, _shape(b, n_head * dim)], f"{short}_joined")


def _shape(b: Builder, last: int) -> str:
    return b.weights.initializers.add(f"shape_{last}", np.array([1, -1, last], np.int64))


def _rotated(b: Builder, scope: Scope, x: str, inputs: Inputs, n_head: int, name: str) -> str:
    """Add the rotary embedding (Su et al. 2021, arXiv:2104.09864): row i of `cos` and `sin` rotates row i of x."""
    n = b.network
    first_row = b.weights.initializers.add("zero", np.array([0], np.int64))
    return scope.add(
        "RotaryEmbedding",
        [x, first_row, inputs.cos, inputs.sin],
        f"{name}_rotated",
        num_heads=n_head,
        rotary_embedding_dim=n.n_rot if n.n_rot < n.head_dim else 0,
        interleaved=int(n.switches.rope_interleaved),
    )
