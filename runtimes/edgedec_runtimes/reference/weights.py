"""The weights of a GGUF as float32 arrays.

The reference runtime refuses a metadata key or a tensor that it does not know, as ignoring it could change a logit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGMLType
from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.reading import Described, read_description
from edgedec_runtimes.architectures.rope import DIVISORS, Turns, turns_in
from edgedec_runtimes.shared.hyperparameters import Hyperparameters

_DTYPES: dict[GGMLType, np.dtype[np.floating]] = {GGMLType.F32: np.dtype("<f4"), GGMLType.F16: np.dtype("<f2")}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; matrices are f32[n_out, n_in], norms and biases f32[n], None where the model has none.

    Attributes:
        sinks: For each head a score that has a part in the softmax, and no value.
        gate, up, down: The feed-forward block, or, in a layer with experts, the one that all tokens go through.
        router: Scores experts; None in a layer without.
        shared_router: Scores the expert that all tokens go through.
        expert_bias: What is added to the gates of experts only to choose them.
        router_bias: Of the scores of experts.
        expert_gate_bias, expert_up_bias, expert_down_bias: f32[n_expert, n_out].
        expert_gate, expert_up, expert_down: f32[n_expert, n_out, n_in].
        turns: How queries and keys are rotated; None where they are not.
        window: How many tokens the layer sees; 0 for all.
        kernels: Of a layer with a short convolution, f32[n_embd, length]: q, k and v are then its C, B and x.
    """

    attn_norm: NDArray[np.float32] | None
    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    q_bias: NDArray[np.float32] | None
    k_bias: NDArray[np.float32] | None
    v_bias: NDArray[np.float32] | None
    q_norm: NDArray[np.float32] | None
    k_norm: NDArray[np.float32] | None
    attn_output: NDArray[np.float32]
    attn_output_bias: NDArray[np.float32] | None
    sinks: NDArray[np.float32] | None
    attn_post_norm: NDArray[np.float32] | None
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
    turns: Turns | None
    window: int
    kernels: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder; `output` is `embedding` where the file ties them."""

    hyper: Hyperparameters
    switches: Switches
    embedding: NDArray[np.float32]
    layers: tuple[Layer, ...]
    output_norm: NDArray[np.float32]
    output: NDArray[np.float32]

    def arrays(self) -> Iterator[NDArray[np.float32]]:
        """Yield every array once, in a fixed order."""
        yield self.embedding
        for layer in self.layers:
            found = (getattr(layer, field.name) for field in fields(layer))
            yield from (array for array in found if isinstance(array, np.ndarray))
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
    found = read_description(gguf, "reference")
    for tensor in gguf.tensors.values():
        if tensor.type not in _DTYPES:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: tensor {tensor.name!r} is {tensor.type.name}, but the reference runtime reads only "
                "F32 and F16: use the llamacpp runtime"
            )
    return found


class _Reader:
    """Reads a file's tensors, and knows which are left.

    Attributes:
        left: The names of tensors that were not read yet.
    """

    def __init__(self, found: Described) -> None:
        self._found = found
        self.left = set(found.gguf.tensors) - (set(DIVISORS) & found.architecture.vectors)

    def take(self, name: str, *shape: int) -> NDArray[np.float32]:
        """Return a tensor, f32[shape]."""
        self.left.discard(name)
        return _read_tensor(self._found.gguf, name, shape)

    def maybe(self, layer: int, short: str, n: int) -> NDArray[np.float32] | None:
        """Return a vector of a layer, f32[n]; None where the architecture or the file has none."""
        name, architecture = f"blk.{layer}.{short}", self._found.architecture
        is_there = short in architecture.vectors and name in self._found.gguf.tensors
        return self.take(name, n) if short in architecture.needed or is_there else None


def read_weights(found: Described, n_ctx: int) -> Weights:
    """Return all tensors of a file as float32 arrays.

    Args:
        found: What the file's header says.
        n_ctx: The context for which positions are scaled, in tokens.

    Raises:
        ModelFormatError: A tensor is missing, or its shape contradicts the hyperparameters.
        UnsupportedModelError: The reference runtime has no use for a tensor.
    """
    reader, gguf, h = _Reader(found), found.gguf, found.hyper
    layers = tuple(_read_layer(reader, found, i, n_ctx) for i in range(h.n_block)) * h.n_loops
    embedding = reader.take("token_embd.weight", h.n_vocab, h.n_embd)
    tied = "output.weight" not in gguf.tensors
    output_norm = reader.take("output_norm.weight", h.n_embd)
    output = embedding if tied else reader.take("output.weight", h.n_vocab, h.n_embd)
    if reader.left:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the reference runtime has no use for tensor {min(reader.left)!r}: use the llamacpp "
            "runtime"
        )
    return Weights(h, found.switches, embedding, layers, output_norm, output)


def _read_layer(reader: _Reader, found: Described, i: int, n_ctx: int) -> Layer:
    h, switches, take, maybe = found.hyper, found.switches, reader.take, reader.maybe
    p, n_q, n_kv, kernels = f"blk.{i}", h.n_head * h.head_dim, h.n_kv, None
    names = ("attn_q", "attn_k", "attn_v", "attn_output")
    n_normed = (n_q, n_kv) if switches.wide_norms else (h.head_dim, h.head_dim)
    if not h.has_attention[i]:
        n_q = n_kv = h.n_embd
        names = ("shortconv.c", "shortconv.b", "shortconv.x", "shortconv.out_proj")
        kernels = take(f"{p}.shortconv.conv.weight", h.n_embd, switches.convolution_length)
    return Layer(
        attn_norm=maybe(i, "attn_norm.weight", h.n_embd),
        q=take(f"{p}.{names[0]}.weight", n_q, h.n_embd),
        k=take(f"{p}.{names[1]}.weight", n_kv, h.n_embd),
        v=take(f"{p}.{names[2]}.weight", n_kv, h.n_embd),
        q_bias=maybe(i, "attn_q.bias", n_q),
        k_bias=maybe(i, "attn_k.bias", n_kv),
        v_bias=maybe(i, "attn_v.bias", n_kv),
        q_norm=maybe(i, "attn_q_norm.weight", n_normed[0]),
        k_norm=maybe(i, "attn_k_norm.weight", n_normed[1]),
        attn_output=take(f"{p}.{names[3]}.weight", h.n_embd, n_q),
        attn_output_bias=maybe(i, "attn_output.bias", h.n_embd),
        sinks=maybe(i, "attn_sinks.weight", h.n_head),
        attn_post_norm=maybe(i, "post_attention_norm.weight", h.n_embd),
        ffn_norm=maybe(i, "ffn_norm.weight", h.n_embd),
        **_read_dense(reader, h, i),
        **_read_experts(reader, h, i),
        ffn_post_norm=maybe(i, "post_ffw_norm.weight", h.n_embd),
        turns=turns_in(found.gguf, switches.rope_of(i), n_ctx) if switches.rotates(i) else None,
        window=switches.sliding_window if switches.slides(i) else 0,
        kernels=kernels,
    )


def _read_dense(reader: _Reader, h: Hyperparameters, i: int) -> dict[str, NDArray[np.float32] | None]:
    """Return the matrices of a layer's feed-forward block, or of the expert that all tokens go through."""
    width, suffix = (h.n_ff_shared, "_shexp") if h.has_experts(i) else (h.n_ff, "")
    if not width:
        return dict.fromkeys(("gate", "up", "down"))
    sizes = {"gate": (width, h.n_embd), "up": (width, h.n_embd), "down": (h.n_embd, width)}
    return {name: reader.take(f"blk.{i}.ffn_{name}{suffix}.weight", *size) for name, size in sizes.items()}


def _read_experts(reader: _Reader, h: Hyperparameters, i: int) -> dict[str, NDArray[np.float32] | None]:
    """Return the matrices of a layer's experts and their routers; None for those that it does not have."""
    p, n, d, names = f"blk.{i}", h.n_expert, h.n_embd, ("expert_gate", "expert_up", "expert_down")
    biases = ("router_bias", *(f"{name}_bias" for name in names))
    if not h.has_experts(i):
        return dict.fromkeys((*names, *biases, "router", "shared_router", "expert_bias"))
    sizes = {"gate": (h.n_ff_expert, d), "up": (h.n_ff_expert, d), "down": (d, h.n_ff_expert)}
    found: dict[str, NDArray[np.float32] | None] = {
        f"expert_{name}": reader.take(f"{p}.ffn_{name}_exps.weight", n * rows, columns).reshape(n, rows, columns)
        for name, (rows, columns) in sizes.items()
    }
    for name, (rows, _) in sizes.items():
        bias = reader.maybe(i, f"ffn_{name}_exps.bias", n * rows)
        found[f"expert_{name}_bias"] = None if bias is None else bias.reshape(n, rows)
    shared = f"{p}.ffn_gate_inp_shexp.weight"
    return found | {
        "router_bias": reader.maybe(i, "ffn_gate_inp.bias", n),
        "router": reader.take(f"{p}.ffn_gate_inp.weight", n, d),
        "shared_router": reader.take(shared, 1, d) if h.n_ff_shared and shared in reader.left else None,
        "expert_bias": reader.maybe(i, "exp_probs_b.bias", n),
    }


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
