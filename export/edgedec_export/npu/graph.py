"""The decoder in a form for NPUs: static shapes, no control flow, attention as single operators, KV cache outside.

    plan = make_plan(network, has=gguf.tensors.__contains__)

A plan is the float network: operators, their inputs, and how each result is quantized. qdq.py makes ONNX of it.

A forward takes the hidden states of its rows (the host looks embeddings up), tables of positions, masks (both made by
`edgedec_runtimes.npu.inputs`) and the cached keys and values. It returns logits of the requested rows and the keys and
values of its rows, which the host copies into its buffers. Sizes that differ between forwards are free dimensions, to
be fixed when a session is made, so that one graph serves all of them: rows (new ones), context (cached slots), slots
(both), grouped_rows (rows times the queries that share a key) and logit_rows.

The hardware multiplies two activations exactly only where one of them has 8 bits. So keys and values, of 16 bits, are
cached and multiplied in two parts of 8: the rounded value, and the rest.

Rotation is in halves for all architectures: where a file pairs neighbours, weights.py reorders the rows of the
matrices. The factor 1/sqrt(head_dim) is part of the queries' weights.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.npu.facts import PARTS


@dataclass(frozen=True, slots=True)
class Op:
    """An operator with one result.

    Attributes:
        operator: ONNX's name, or "Recast", which only quantizes anew.
        inputs: Names of activations, constants, vectors or matrices.
        same: The result has the quantization of the first input, because elements are moved, not computed.
    """

    operator: str
    inputs: tuple[str, ...]
    output: str
    attributes: dict[str, Any]
    same: bool


@dataclass(slots=True)
class Plan:
    """A network of operators; `matrices` and `vectors` are names of the GGUF's tensors.

    Attributes:
        inputs: Shape of each quantized input; a size is a number or the name of a free dimension.
        outputs: Shape of each output; an output has the name of its activation.
        constants: Integers that shapes are made of.
        fitted: Shape of each vector that calibration finds, which the file does not hold.
        masked: Scores to which the mask has been added.
        limits: By name of a result, the magnitude beyond which the result is clipped.
        coarse: Differences and products whose steps are so long that the hardware's errors around 0 become 0.
        derived: Activations and inputs that are quantized like another one: the relation ("same", its "high" or "low"
            part in 8 bits, or "finer" steps), and the other's name.
    """

    inputs: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    outputs: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    constants: dict[str, NDArray[np.int64]] = field(default_factory=dict)
    matrices: list[str] = field(default_factory=list)
    vectors: list[str] = field(default_factory=list)
    fitted: dict[str, tuple[int, ...]] = field(default_factory=dict)
    masked: list[str] = field(default_factory=list)
    limits: dict[str, float] = field(default_factory=dict)
    coarse: set[str] = field(default_factory=set)
    derived: dict[str, tuple[str, str]] = field(default_factory=dict)

    def add(self, operator: str, inputs: list[str], output: str, *, same: bool = False, **attributes: Any) -> str:
        """Add an operator and return its result's name."""
        self.ops.append(Op(operator, tuple(inputs), output, attributes, same))
        return output

    def numbers(self, *values: int) -> str:
        """Add a constant int64[n] and return its name."""
        name = f"numbers/{'_'.join(map(str, values))}"
        self.constants[name] = np.array(values, np.int64)
        return name

    def linear(self, x: str, matrix: str, output: str) -> str:
        """Add the product of x [rows, n_in] and a matrix [n_in, n_out], and return its name."""
        self.matrices.append(matrix)
        return self.add("MatMul", [x, matrix], output)

    def norm(self, x: str, vector: str, output: str, epsilon: float) -> str:
        """Add an RMS norm over the last axis (Zhang and Sennrich 2019, arXiv:1910.07467), and return its name."""
        self.vectors.append(vector)
        return self.add("RMSNormalization", [x, vector], output, axis=-1, epsilon=epsilon)

    def reshape(self, x: str, output: str, *shape: int) -> str:
        """Add a reshape and return its name; 0 keeps a size, -1 stands for the remaining elements."""
        return self.add("Reshape", [x, self.numbers(*shape)], output, same=True)

    def transpose(self, x: str, output: str, *order: int) -> str:
        """Add a transposition of three axes and return its name."""
        return self.add("Transpose", [x], output, same=True, perm=list(order))


@dataclass(frozen=True, slots=True)
class _Context:
    """What all layers are made with."""

    plan: Plan
    network: Network
    has: Callable[[str], bool]
    limits: Mapping[int, float]


def make_plan(network: Network, has: Callable[[str], bool], limits: Mapping[int, float] | None = None) -> Plan:
    """Return the plan of a network.

    Args:
        network: Shape and switches.
        has: Tells whether the file has a tensor of a name.
        limits: By layer, the magnitude above which products of the feed-forward block are computed separately.
    """
    n, plan = network, Plan()
    context = _Context(plan, network, has, limits or {})
    plan.inputs["hidden"] = ("rows", n.n_embd)
    for suffix in ("", "_local") if n.switches.sliding_window else ("",):
        plan.inputs |= {f"{name}{suffix}": ("rows", 1, n.head_dim) for name in ("cos", "sin")}
        plan.inputs[f"mask{suffix}"] = ("grouped_rows", "slots")
    state = "hidden"
    for layer in range(n.n_layer):
        state = _attention(context, layer, state)
        state = _feed_forward(context, layer, state)
    # Rows are selected before the head, as it is the largest matrix of small models.
    selected = plan.add("Gather", [state, "logit_rows"], "wanted", same=True, axis=0)
    normed = plan.norm(selected, "output_norm.weight", "output_norm", n.rms_epsilon)
    head = "output.weight" if has("output.weight") else "token_embd.weight"
    plan.linear(normed, head, "logits")
    plan.outputs["logits"] = ("logit_rows", n.n_vocab)
    return plan


def _attention(context: _Context, layer: int, state: str) -> str:
    """Add an attention block with grouped queries (Ainslie et al. 2023, arXiv:2305.13245)."""
    plan, n, p = context.plan, context.network, f"blk.{layer}"
    kv, head = n.n_head_kv, n.head_dim
    x = plan.norm(state, f"{p}.attn_norm.weight", f"{p}.attn_norm", n.rms_epsilon)
    q = _rotated(context, layer, _heads(context, layer, "attn_q", x, n.n_head), "attn_q")
    q = plan.transpose(q, f"{p}.attn_q.by_head", 1, 0, 2)
    q = plan.reshape(q, f"{p}.attn_q.grouped", kv, -1, head)
    k = _rotated(context, layer, _heads(context, layer, "attn_k", x, kv), "attn_k")
    # A vector added to all keys shifts all scores of a query equally, which changes no softmax.
    plan.fitted[f"{p}.key_offsets"] = kv, head
    k = plan.add("Add", [k, f"{p}.key_offsets"], f"{p}.attn_k.centred")
    keys = _cached(context, layer, "key", k, (1, 2, 0), 2)
    values = _cached(context, layer, "value", _heads(context, layer, "attn_v", x, kv), (1, 0, 2), 1)
    scores = _product(plan, q, keys, f"{p}.scores")
    mask = "mask_local" if n.switches.slides(layer) else "mask"
    scores = plan.add("Add", [scores, mask], f"{p}.masked")
    plan.masked.append(scores)
    weights = plan.add("Softmax", [scores], f"{p}.weights", axis=-1)
    mixed = _product(plan, weights, values, f"{p}.mixed")
    mixed = plan.reshape(mixed, f"{p}.mixed.by_head", n.n_head, -1, head)
    mixed = plan.transpose(mixed, f"{p}.mixed.by_row", 1, 0, 2)
    mixed = plan.reshape(mixed, f"{p}.mixed.flat", 0, n.n_head * head)
    plan.fitted[f"{p}.value_factors"] = (n.n_head * head,)
    mixed = plan.add("Mul", [mixed, f"{p}.value_factors"], f"{p}.mixed.scaled")
    y = plan.linear(mixed, f"{p}.attn_output.weight", f"{p}.attn_output")
    return _added(context, layer, "post_attention_norm", state, y, "attn")


def _product(plan: Plan, x: str, parts: tuple[str, str], output: str) -> str:
    """Add the product of an activation and another one that is given in two parts."""
    high, low = (plan.add("MatMul", [x, y], f"{output}.{name}") for y, name in zip(parts, PARTS, strict=True))
    plan.derived[low] = "finer", high
    return plan.add("Add", [high, low], output)


def _feed_forward(context: _Context, layer: int, state: str) -> str:
    """Add a gated feed-forward block (Shazeer 2020, arXiv:2002.05202)."""
    plan, n, p = context.plan, context.network, f"blk.{layer}"
    x = plan.norm(state, f"{p}.ffn_norm.weight", f"{p}.ffn_norm", n.rms_epsilon)
    gate = plan.linear(x, f"{p}.ffn_gate.weight", f"{p}.ffn_gate")
    up = plan.linear(x, f"{p}.ffn_up.weight", f"{p}.ffn_up")
    if n.switches.activation == "gelu":
        gate = plan.add("Gelu", [gate], f"{p}.ffn_gate.gelu", approximate="tanh")
    else:
        share = plan.add("Sigmoid", [gate], f"{p}.ffn_gate.sigmoid")
        gate = plan.add("Mul", [gate, share], f"{p}.ffn_gate.silu")
    product = plan.add("Mul", [gate, up], f"{p}.ffn_product")
    if layer in context.limits:
        return _feed_forward_apart(context, layer, state, (gate, up))
    y = plan.linear(product, f"{p}.ffn_down.weight", f"{p}.ffn_down")
    return _added(context, layer, "post_ffw_norm", state, y, "ffn")


def _feed_forward_apart(context: _Context, layer: int, state: str, factors: tuple[str, str]) -> str:
    """Add the end of a feed-forward block some of whose products are far larger than most.

    One token of a text may have products thousands of times larger than all others, and without these the text would be
    another. So the part below a limit and the part beyond it go through the matrix separately, each with steps of its
    own length. The steps of the second part are so long that it and its product are 0 where nothing is beyond the
    limit. The first part is computed from the factors again, as the steps of the whole product are longer than most
    products.
    """
    plan, p = context.plan, f"blk.{layer}"
    low, rest = f"{p}.ffn_low", f"{p}.ffn_rest"
    plan.limits[low] = context.limits[layer]
    plan.add("Mul", list(factors), low)
    plan.add("Sub", [f"{p}.ffn_product", low], rest)
    plan.coarse.add(rest)
    y = plan.linear(low, f"{p}.ffn_down.weight", f"{p}.ffn_down.low")
    state = _added(context, layer, "post_ffw_norm", state, y, "ffn_low")
    rest = plan.add("MatMul", [rest, f"{p}.ffn_down.weight"], f"{p}.ffn_down.rest")
    plan.coarse.add(rest)
    return plan.add("Add", [state, rest], f"{p}.ffn_state")


def _added(context: _Context, layer: int, post_norm: str, state: str, y: str, name: str) -> str:
    """Add y, normalized where the architecture does that, to the hidden state."""
    plan, p = context.plan, f"blk.{layer}"
    if context.has(f"{p}.{post_norm}.weight"):
        y = plan.norm(y, f"{p}.{post_norm}.weight", f"{p}.{post_norm}", context.network.rms_epsilon)
    return plan.add("Add", [state, y], f"{p}.{name}_state")


def _heads(context: _Context, layer: int, name: str, x: str, n_head: int) -> str:
    """Add a projection, its bias and its norm; return its name: [rows, n_head, head_dim]."""
    plan, p = context.plan, f"blk.{layer}.{name}"
    y = plan.linear(x, f"{p}.weight", p)
    if context.has(f"{p}.bias"):
        plan.vectors.append(f"{p}.bias")
        y = plan.add("Add", [y, f"{p}.bias"], f"{p}.biased")
    y = plan.reshape(y, f"{p}.heads", 0, n_head, context.network.head_dim)
    if context.has(f"{p}_norm.weight"):
        y = plan.norm(y, f"{p}_norm.weight", f"{p}_norm", context.network.rms_epsilon)
    return y


def _rotated(context: _Context, layer: int, x: str, name: str) -> str:
    """Add the rotation of x [rows, n_head, head_dim] by the rows' positions."""
    plan, n, p = context.plan, context.network, f"blk.{layer}.{name}"
    suffix, half = "_local" if n.switches.slides(layer) else "", n.n_rot // 2
    ends = (0, half, n.n_rot, n.head_dim)
    parts = [_slice(plan, x, f"{p}.part_{i}", ends[i], ends[i + 1]) for i in range(3) if ends[i] < ends[i + 1]]
    parts[:2] = parts[1], parts[0]
    turned = plan.add("Concat", parts, f"{p}.turned", same=True, axis=2)
    straight = plan.add("Mul", [x, f"cos{suffix}"], f"{p}.straight")
    across = plan.add("Mul", [turned, f"sin{suffix}"], f"{p}.across")
    return plan.add("Add", [straight, across], f"{p}.rotated")


def _slice(plan: Plan, x: str, output: str, start: int, stop: int) -> str:
    bounds = [plan.numbers(value) for value in (start, stop, 2)]
    return plan.add("Slice", [x, *bounds], output, same=True)


def _cached(
    context: _Context, layer: int, what: str, x: str, order: tuple[int, int, int], axis: int
) -> tuple[str, str]:
    """Add the rows' keys or values to the outputs, in two parts; return each joined with the cached ones."""
    plan, p = context.plan, f"blk.{layer}.{what}"
    high = plan.add("Recast", [x], f"{p}.high")
    rounded = plan.add("Recast", [high], f"{p}.rounded")
    rest = plan.add("Sub", [x, rounded], f"{p}.rest")
    low = plan.add("Recast", [rest], f"{p}.low")
    plan.derived |= {high: ("high", x), rounded: ("same", x), rest: ("same", x), low: ("low", x)}
    first, second = (
        _joined(context, layer, f"{what}_{name}", y, order, axis) for name, y in zip(PARTS, (high, low), strict=True)
    )
    return first, second


def _joined(context: _Context, layer: int, what: str, x: str, order: tuple[int, ...], axis: int) -> str:
    plan, n = context.plan, context.network
    past, new = f"past_{what}_{layer}", f"new_{what}_{layer}"
    shape: list[int | str] = [n.n_head_kv, n.head_dim, n.head_dim]
    shape[axis] = "context"
    plan.inputs[past], plan.derived[past] = tuple(shape), ("same", x)
    shape[axis] = "rows"
    plan.outputs[new] = tuple(shape)
    plan.transpose(x, new, *order)
    return plan.add("Concat", [past, new], f"blk.{layer}.{what}s", same=True, axis=axis)
