"""The weights of a GGUF as float32 arrays.

The reference runtime refuses a metadata key or a tensor that it does not know, as ignoring it could change a logit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGMLType
from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.fused import PER_LAYER_TABLE
from edgedec_runtimes.architectures.reading import Described, read_description
from edgedec_runtimes.architectures.rope import DIVISORS, Turns, turns_in
from edgedec_runtimes.reference.recurrent import RecurrentWeights
from edgedec_runtimes.shared.hyperparameters import ATTENTION, NO_MIXER, RECURRENT, Hyperparameters

_MAY_LACK = tuple(
    """
    attn_norm k v q_bias k_bias v_bias q_norm k_norm attn_output_bias sinks attn_post_norm kernels
    """.split()
)
_CONVOLVED = ("shortconv.c", "shortconv.b", "shortconv.x", "shortconv.out_proj")
_DTYPES: dict[GGMLType, np.dtype[np.floating]] = {GGMLType.F32: np.dtype("<f4"), GGMLType.F16: np.dtype("<f2")}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; matrices are f32[n_out, n_in], norms and biases f32[n], None where the model has none.

    Attributes:
        q, attn_output: Empty where the layer has neither attention nor a convolution.
        k, v: None where the layer reads the keys and values of another one; v also where the values are the keys.
        sinks: For each head a score that has a part in the softmax, and no value.
        gate, up, down: The feed-forward block, or, in a layer with experts, the one that all tokens go through; `gate`
            and `expert_gate` are None in networks without gates.
        router: Scores experts; None in a layer without.
        shared_router: Scores the expert that all tokens go through.
        expert_bias: What is added to the gates of experts only to choose them.
        router_bias: Of the scores of experts.
        expert_gate_bias, expert_up_bias, expert_down_bias: f32[n_expert, n_out].
        expert_gate, expert_up, expert_down: f32[n_expert, n_out, n_in].
        turns: How queries and keys are rotated; None where they are not.
        window: How many tokens the layer sees; 0 for all.
        router_norm, experts_norm: Norms before the router and before the experts, where they don't read what the other
            matrices of the block read.
        dense_post_norm, experts_post_norm: Norms behind the feed-forward block and behind the experts beside it.
        expert_scales: f32[n_expert], what the weights of experts are multiplied by.
        token_gate, token_output, token_norm: What makes a part of the hidden state of what the layer gets of a token.
        scale: f32[1], what the hidden state is multiplied by behind the layer.
        recurrence: Of a layer with a recurrent state.
        kernels: Of a layer with a short convolution, f32[n_embd, length]: q, k and v are then its C, B and x.
    """

    attn_norm: NDArray[np.float32] | None
    q: NDArray[np.float32]
    k: NDArray[np.float32] | None
    v: NDArray[np.float32] | None
    q_bias: NDArray[np.float32] | None
    k_bias: NDArray[np.float32] | None
    v_bias: NDArray[np.float32] | None
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    attn_output: NDArray[np.float32]
    attn_output_bias: NDArray[np.float32] | None
    sinks: NDArray[np.float32] | None
    attn_post_norm: NDArray[np.float32] | None
    kernels: NDArray[np.float32] | None
    ffn_norm: NDArray[np.float32] | None
    gate: NDArray[np.float32] | None
    up: NDArray[np.float32] | None
    down: NDArray[np.float32] | None
    ffn_post_norm: NDArray[np.float32] | None
    router: NDArray[np.float32] | None
    shared_router: NDArray[np.float32] | None
    expert_bias: NDArray[np.float32] | None
    router_bias: NDArray[np.float32] | None
    expert_gate_bias: NDArray[np.float32] | None
    expert_up_bias: NDArray[np.float32] | None
    expert_down_bias: NDArray[np.float32] | None
    expert_gate: NDArray[np.float32] | None
    expert_up: NDArray[np.float32] | None
    expert_down: NDArray[np.float32] | None
    router_norm: NDArray[np.float32] | None
    experts_norm: NDArray[np.float32] | None
    dense_post_norm: NDArray[np.float32] | None
    experts_post_norm: NDArray[np.float32] | None
    expert_scales: NDArray[np.float32] | None
    token_gate: NDArray[np.float32] | None
    token_output: NDArray[np.float32] | None
    token_norm: NDArray[np.float32] | None
    scale: NDArray[np.float32] | None
    turns: Turns | None
    window: int
    recurrence: RecurrentWeights | None


@dataclass(frozen=True, slots=True)
class PerLayer:
    """What the layers get of a token beside the hidden state (Gemma 3n's per-layer embeddings).

    Attributes:
        embedding: f32[n_vocab, n_layer, n_per_layer].
        projection: f32[n_layer * n_per_layer, n_embd], of what enters the first layer.
        norm: f32[n_per_layer], of each layer's part of the projection.
    """

    embedding: NDArray[np.float32]
    projection: NDArray[np.float32]
    norm: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder; `output` is `embedding` where the file ties them."""

    hyper: Hyperparameters
    switches: Switches
    embedding: NDArray[np.float32]
    layers: tuple[Layer, ...]
    output_norm: NDArray[np.float32]
    output: NDArray[np.float32]
    per_layer: PerLayer | None

    def arrays(self) -> Iterator[NDArray[np.float32]]:
        """Yield every array once, in a fixed order."""
        yield self.embedding
        if self.per_layer is not None:
            yield from (self.per_layer.embedding, self.per_layer.projection, self.per_layer.norm)
        for layer in self.layers:
            values = (getattr(layer, field.name) for field in fields(layer))
            yield from (array for array in values if isinstance(array, np.ndarray))
            yield from layer.recurrence.arrays() if layer.recurrence is not None else ()
        yield self.output_norm
        if self.output is not self.embedding:
            yield self.output

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())


def n_weight_bytes(gguf: GGUF) -> int:
    """Return how many bytes the weights of a file take as float32."""
    return sum(4 * tensor.n_elements for tensor in gguf.tensors.values())


def read_shape(gguf: GGUF) -> Described:
    """Return what the header of a model that the reference runs says of its network.

    Raises:
        UnsupportedModelError: The reference does not run this file.
        ModelFormatError: The file contradicts itself.
        PluginError: Another package's architecture does not import.
    """
    description = read_description(gguf, "reference")
    for tensor in gguf.tensors.values():
        if tensor.type not in _DTYPES:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: tensor {tensor.name!r} is {tensor.type.name}, but the reference runtime reads only "
                "F32 and F16: use the llamacpp runtime"
            )
    return description


class _Reader:
    """Reads a file's tensors, and knows which are left.

    Attributes:
        left: The names of tensors that were not read yet.
    """

    def __init__(self, description: Described) -> None:
        self._found = description
        self.left = set(description.gguf.tensors) - (set(DIVISORS) & description.architecture.vectors)

    def has(self, name: str) -> bool:
        """Return whether the file has a tensor."""
        return name in self._found.gguf.tensors

    def take(self, name: str, *shape: int) -> NDArray[np.float32]:
        """Return a tensor, f32[shape]."""
        self.left.discard(name)
        return _read_tensor(self._found.gguf, name, shape)

    def maybe(self, layer: int, short: str, n: int) -> NDArray[np.float32] | None:
        """Return a vector of a layer, f32[n]; None where the architecture or the file has none."""
        name, architecture = f"blk.{layer}.{short}", self._found.architecture
        is_there = short in architecture.vectors and name in self._found.gguf.tensors
        return self.take(name, n) if short in architecture.needed or is_there else None


def read_weights(description: Described, n_ctx: int) -> Weights:
    """Return all tensors of a file as float32 arrays.

    Args:
        description: What the file's header says.
        n_ctx: The context for which positions are scaled, in tokens.

    Raises:
        ModelFormatError: A tensor is missing, or its shape contradicts the hyperparameters.
        UnsupportedModelError: The reference runtime has no use for a tensor.
    """
    reader, gguf, h = _Reader(description), description.gguf, description.hyper
    layers = tuple(_read_layer(reader, description, i, n_ctx) for i in range(h.n_block)) * h.n_loops
    embedding = reader.take("token_embd.weight", h.n_vocab, h.n_embd)
    tied = "output.weight" not in gguf.tensors
    output_norm = reader.take("output_norm.weight", h.n_embd)
    output = embedding if tied else reader.take("output.weight", h.n_vocab, h.n_embd)
    per_layer = _read_per_layer(reader, h) if h.n_per_layer else None
    if reader.left:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the reference runtime has no use for tensor {min(reader.left)!r}: use the llamacpp "
            "runtime"
        )
    return Weights(h, description.switches, embedding, layers, output_norm, output, per_layer)


def _read_layer(reader: _Reader, description: Described, i: int, n_ctx: int) -> Layer:
    h, switches, maybe = description.hyper, description.switches, reader.maybe
    has_mlp = h.has_mlp(i)
    return Layer(
        **_read_mixer(reader, description, i),
        ffn_norm=maybe(i, "ffn_norm.weight", h.n_embd) if has_mlp else None,
        **_read_dense(reader, h, i, ungated=switches.ungated),
        **_read_experts(reader, h, i, ungated=switches.ungated),
        **_read_token_parts(reader, h, i),
        scale=maybe(i, "layer_output_scale.weight", 1),
        ffn_post_norm=maybe(i, "post_ffw_norm.weight", h.n_embd) if has_mlp else None,
        turns=turns_in(description.gguf, switches.rope_of(i), n_ctx) if switches.rotates(i) else None,
        window=switches.sliding_window if switches.slides(i) else 0,
        recurrence=_read_recurrence(reader, description, i),
    )


def _read_mixer(reader: _Reader, description: Described, i: int) -> dict[str, Any]:
    """Return the fields of Layer about its attention or convolution; None for vectors that it does not have."""
    h, shape, maybe, p = description.hyper, description.hyper.layers[i], reader.maybe, f"blk.{i}"
    d, is_attention = h.n_embd, shape.has(ATTENTION)
    n_q, n_kv = (shape.n_q, shape.n_kv) if is_attention else (d, d)
    q, k, v, out = ("attn_q", "attn_k", "attn_v", "attn_output") if is_attention else _CONVOLVED
    normed = (n_q, n_kv) if description.switches.wide_norms else (shape.head_dim, shape.head_dim)
    read: dict[str, Any] = dict.fromkeys(_MAY_LACK)
    if shape.mixer != NO_MIXER:
        read |= {"attn_norm": maybe(i, "attn_norm.weight", d)}
    if shape.mixer in (NO_MIXER, RECURRENT):
        return read | {"q": np.zeros((0, d), np.float32), "attn_output": np.zeros((d, 0), np.float32)}
    read |= {
        "q": reader.take(
            f"{p}.{q}.weight", n_q * (2 if description.switches.attention_gate and is_attention else 1), d
        ),
        "attn_output": reader.take(f"{p}.{out}.weight", d, n_q),
        "attn_post_norm": maybe(i, "post_attention_norm.weight", d),
    }
    if not is_attention or h.stores_kv(i):
        read["k"] = reader.take(f"{p}.{k}.weight", n_kv, d)
        if not description.switches.value_norm or f"{p}.{v}.weight" in reader.left:
            read["v"] = reader.take(f"{p}.{v}.weight", n_kv, d)
    if not is_attention:
        return read | {"kernels": reader.take(f"{p}.shortconv.conv.weight", d, description.switches.convolution_length)}
    return read | {
        "q_bias": maybe(i, "attn_q.bias", n_q),
        "k_bias": maybe(i, "attn_k.bias", n_kv),
        "v_bias": maybe(i, "attn_v.bias", n_kv),
        "q_norm": maybe(i, "attn_q_norm.weight", normed[0]),
        "k_norm": maybe(i, "attn_k_norm.weight", normed[1]) if h.stores_kv(i) else None,
        "attn_output_bias": maybe(i, "attn_output.bias", d),
        "sinks": maybe(i, "attn_sinks.weight", shape.n_head),
    }


def _read_per_layer(reader: _Reader, h: Hyperparameters) -> PerLayer:
    n, width = h.n_layer, h.n_per_layer
    return PerLayer(
        reader.take(PER_LAYER_TABLE, n * h.n_vocab, width).reshape(h.n_vocab, n, width),
        reader.take("per_layer_model_proj.weight", n * width, h.n_embd),
        reader.take("per_layer_proj_norm.weight", width),
    )


def _read_token_parts(reader: _Reader, h: Hyperparameters, i: int) -> dict[str, Any]:
    """Return the fields of Layer about what it gets of a token."""
    if not h.n_per_layer:
        return dict.fromkeys(("token_gate", "token_output", "token_norm"))
    return {
        "token_gate": reader.take(f"blk.{i}.inp_gate.weight", h.n_per_layer, h.n_embd),
        "token_output": reader.take(f"blk.{i}.proj.weight", h.n_embd, h.n_per_layer),
        "token_norm": reader.maybe(i, "post_norm.weight", h.n_embd),
    }


def _read_recurrence(reader: _Reader, description: Described, i: int) -> RecurrentWeights | None:
    """Return the weights of a layer with a recurrent state; None for a layer without."""
    sizes, d, p = description.switches.recurrence, description.hyper.n_embd, f"blk.{i}"
    if sizes is None or not description.hyper.has_mixer(i, RECURRENT):
        return None
    beta, is_space = f"{p}.ssm_beta.weight", sizes.rule == "space"
    is_joined = not is_space and beta not in reader.left
    norm = reader.maybe(i, "ssm_norm.weight", sizes.n_norm)
    return RecurrentWeights(
        mix=reader.take(f"{p}.ssm_mix.weight", sizes.n_column, d),
        gate=reader.take(f"{p}.ssm_gate.weight", sizes.n_values, d),
        alpha=reader.take(f"{p}.ssm_alpha.weight", sizes.n_head * (2 if is_joined else 1), d),
        beta=None if is_space or is_joined else reader.take(beta, sizes.n_head, d),
        output=reader.take(f"{p}.ssm_out.weight", d, sizes.n_values),
        kernels=reader.take(f"{p}.ssm_conv1d.weight", sizes.n_column, sizes.length),
        kernel_bias=reader.take(f"{p}.ssm_conv1d.bias", sizes.n_column) if is_space else None,
        bias=reader.take(f"{p}.ssm_dt.bias", sizes.n_head),
        rate=reader.take(f"{p}.ssm_a", sizes.n_head),
        norm=norm,
        passed=reader.take(f"{p}.ssm_d", sizes.n_head) if is_space else None,
    )


def _read_dense(reader: _Reader, h: Hyperparameters, i: int, *, ungated: bool) -> dict[str, Any]:
    """Return the matrices of a layer's feed-forward block, or of the expert that all tokens go through."""
    width, suffix = h.dense_width(i), "_shexp" if h.has_experts(i) else ""
    if not width:
        return dict.fromkeys(("gate", "up", "down"))
    sizes = {"gate": (width, h.n_embd), "up": (width, h.n_embd), "down": (h.n_embd, width)}
    if ungated:
        del sizes["gate"]
    return {"gate": None} | {
        name: reader.take(f"blk.{i}.ffn_{name}{suffix}.weight", *size) for name, size in sizes.items()
    }


def _read_experts(reader: _Reader, h: Hyperparameters, i: int, *, ungated: bool) -> dict[str, Any]:
    """Return the matrices of a layer's experts and their routers; None for those that it does not have."""
    p, n, d, names = f"blk.{i}", h.n_expert, h.n_embd, ("expert_gate", "expert_up", "expert_down")
    biases = ("router_bias", *(f"{name}_bias" for name in names))
    norms = ("router_norm", "experts_norm", "dense_post_norm", "experts_post_norm", "expert_scales")
    if not h.has_experts(i):
        return dict.fromkeys((*names, *biases, *norms, "router", "shared_router", "expert_bias"))
    sizes = {"gate": (h.n_ff_expert, d), "up": (h.n_ff_expert, d), "down": (d, h.n_ff_expert)}
    if ungated:
        del sizes["gate"]
    experts: dict[str, Any] = {"expert_gate": None, "expert_gate_bias": None}
    for name, (rows, columns) in sizes.items():
        fused = f"{p}.ffn_gate_up_exps.weight"
        if name != "down" and reader.has(fused):
            pair = reader.take(fused, n * 2 * rows, columns).reshape(n, 2, rows, columns)
            experts[f"expert_{name}"] = pair[:, int(name == "up")]
        else:
            matrix = reader.take(f"{p}.ffn_{name}_exps.weight", n * rows, columns)
            experts[f"expert_{name}"] = matrix.reshape(n, rows, columns)
    for name, (rows, _) in sizes.items():
        bias = reader.maybe(i, f"ffn_{name}_exps.bias", n * rows)
        experts[f"expert_{name}_bias"] = None if bias is None else bias.reshape(n, rows)
    shared = f"{p}.ffn_gate_inp_shexp.weight"
    return experts | {
        "router_bias": reader.maybe(i, "ffn_gate_inp.bias", n),
        "router": reader.take(f"{p}.ffn_gate_inp.weight", n, d),
        "shared_router": reader.take(shared, 1, d) if h.n_ff_shared and shared in reader.left else None,
        "router_norm": _scaled(reader.maybe(i, "ffn_gate_inp.scale", d), d**-0.5),
        "experts_norm": reader.maybe(i, "pre_ffw_norm_2.weight", d),
        "dense_post_norm": reader.maybe(i, "post_ffw_norm_1.weight", d),
        "experts_post_norm": reader.maybe(i, "post_ffw_norm_2.weight", d),
        "expert_scales": reader.maybe(i, "ffn_down_exps.scale", n),
        "expert_bias": reader.maybe(i, "exp_probs_b.bias", n),
    }


def _scaled(x: NDArray[np.float32] | None, factor: float) -> NDArray[np.float32] | None:
    return None if x is None else x * np.float32(factor)


def _read_tensor(gguf: GGUF, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    data = gguf.read_tensor_bytes(name)
    tensor = gguf.tensors[name]
    if tensor.shape != shape[::-1]:
        raise ModelFormatError(
            f"{gguf.paths[0]}: tensor {name!r} has the shape {tensor.shape}, expected {shape[::-1]}; "
            "download the file again"
        )
    values: NDArray[np.float32] = np.frombuffer(data, _DTYPES[tensor.type]).astype(np.float32)
    return values.reshape(shape)
