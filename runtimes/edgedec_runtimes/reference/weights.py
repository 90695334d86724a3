"""The weights of a GGUF as float32 arrays.

The reference runtime refuses a metadata key or a tensor that it does not know, as ignoring it could change a logit.
"""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGMLType
from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.fused import PER_LAYER_TABLE
from edgedec_runtimes.architectures.reading import Described, read_description
from edgedec_runtimes.architectures.rope import DIVISORS, Turns, turns_in
from edgedec_runtimes.shared.hyperparameters import ATTENTION, CONVOLUTION, NO_MIXER, RECURRENT, Hyperparameters

_DTYPES: dict[GGMLType, np.dtype[np.floating]] = {GGMLType.F32: np.dtype("<f4"), GGMLType.F16: np.dtype("<f2")}
_FUSED = "ffn_gate_up_exps.weight"
_GATES = ("ffn_gate.weight", "ffn_gate_shexp.weight", "ffn_gate_exps.weight")

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer, whose tensors are read by the names that they have in a file behind `blk.0.`: layer["attn_q.weight"].

    Attributes:
        tensors: Matrices f32[n_out, n_in], norms and biases f32[n]; those of experts f32[n_expert, ...], gates and ups
            apart. What the layer does not have is absent.
        turns: How queries and keys are rotated; None where they are not.
        window: How many tokens the layer sees; 0 for all.
    """

    tensors: Mapping[str, Floats]
    turns: Turns | None
    window: int

    def __getitem__(self, name: str) -> Floats:
        return self.tensors[name]

    def get(self, name: str) -> Floats | None:
        """Return a tensor; None where the layer has none of that name."""
        return self.tensors.get(name)


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
            yield from layer.tensors.values()
        yield self.output_norm
        if self.output is not self.embedding:
            yield self.output

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays())


def read_shape(gguf: GGUF) -> Described:
    """Return what the header of a model that the reference runs says of its network.

    Raises:
        UnsupportedModelError: The reference does not run this file.
        ModelFormatError: The file contradicts itself.
        PluginError: Another package's architecture does not import.
    """
    description = read_description(gguf, "reference")
    if description.hyper.n_source:
        raise UnsupportedModelError(f"{gguf.paths[0]}: the reference runtime has no encoder: use the cpu runtime")
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

    def take(self, name: str, *shape: int) -> NDArray[np.float32]:
        """Return a tensor, f32[shape]."""
        self.left.discard(name)
        return _read_tensor(self._found.gguf, name, shape)


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
    h, switches, architecture, prefix = description.hyper, description.switches, description.architecture, f"blk.{i}."
    present = {name.removeprefix(prefix) for name in description.gguf.tensors if name.startswith(prefix)}
    shapes = _matrices(description, i, present) | {
        name: (n,)
        for name, n in _vectors(description, i).items()
        if name in architecture.needed or (name in architecture.vectors and name in present)
    }
    tensors = {name: reader.take(prefix + name, *shape) for name, shape in shapes.items()}
    for name, array in tensors.items():
        if "_exps." in name and not name.endswith(".scale"):
            tensors[name] = array.reshape(h.n_expert, -1, *array.shape[1:])
    if _FUSED in tensors:
        tensors["ffn_gate_exps.weight"], tensors["ffn_up_exps.weight"] = np.split(tensors.pop(_FUSED), 2, axis=1)
    if "ffn_gate_inp.scale" in tensors:  # routers read normed states over the root of their length
        tensors["ffn_gate_inp.scale"] *= np.float32(h.n_embd**-0.5)
    turns = turns_in(description.gguf, switches.rope_of(i), n_ctx) if switches.rotates(i) else None
    return Layer(tensors, turns, switches.sliding_window if switches.slides(i) else 0)


def _matrices(description: Described, i: int, present: Set[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a layer must have; `present` says which of several forms the file has."""
    h, switches, shape = description.hyper, description.switches, description.hyper.layers[i]
    n_embd, n_expert, n_ff, needed = h.n_embd, h.n_expert, h.n_ff_expert, dict[str, tuple[int, ...]]()
    if shape.has(ATTENTION):
        needed["attn_q.weight"] = (shape.n_q * (2 if switches.attention_gate else 1), n_embd)
        needed["attn_output.weight"] = (n_embd, shape.n_q)
        if h.stores_kv(i):
            needed["attn_k.weight"] = (shape.n_kv, n_embd)
            if not switches.value_norm or "attn_v.weight" in present:
                needed["attn_v.weight"] = (shape.n_kv, n_embd)
    if shape.has(CONVOLUTION):
        needed |= {f"shortconv.{part}.weight": (n_embd, n_embd) for part in ("c", "b", "x", "out_proj")}
        needed["shortconv.conv.weight"] = (n_embd, switches.convolution_length)
    if width := h.dense_width(i):
        end = "_shexp.weight" if h.has_experts(i) else ".weight"
        needed |= {
            f"ffn_gate{end}": (width, n_embd),
            f"ffn_up{end}": (width, n_embd),
            f"ffn_down{end}": (n_embd, width),
        }
    if h.has_experts(i):
        needed |= {"ffn_gate_inp.weight": (n_expert, n_embd), "ffn_down_exps.weight": (n_expert * n_embd, n_ff)}
        if _FUSED in present:
            needed[_FUSED] = (2 * n_expert * n_ff, n_embd)
        else:
            needed |= {
                "ffn_gate_exps.weight": (n_expert * n_ff, n_embd),
                "ffn_up_exps.weight": (n_expert * n_ff, n_embd),
            }
        if h.n_ff_shared and "ffn_gate_inp_shexp.weight" in present:
            needed["ffn_gate_inp_shexp.weight"] = (1, n_embd)
    if switches.ungated:
        needed = {name: size for name, size in needed.items() if name not in _GATES}
    if h.n_per_layer:
        needed |= {"inp_gate.weight": (h.n_per_layer, n_embd), "proj.weight": (n_embd, h.n_per_layer)}
    recurrence = switches.recurrence
    if recurrence is None or not shape.has(RECURRENT):
        return needed
    n_column, n_head, n_values = recurrence.n_column, recurrence.n_head, recurrence.n_values
    is_space, has_beta = recurrence.rule == "space", "ssm_beta.weight" in present
    needed |= {
        "ssm_mix.weight": (n_column, n_embd),
        "ssm_gate.weight": (n_values, n_embd),
        "ssm_out.weight": (n_embd, n_values),
        "ssm_alpha.weight": (n_head if is_space or has_beta else 2 * n_head, n_embd),
        "ssm_conv1d.weight": (n_column, recurrence.length),
        "ssm_dt.bias": (n_head,),
        "ssm_a": (n_head,),
    }
    if is_space:
        return needed | {"ssm_conv1d.bias": (n_column,), "ssm_d": (n_head,)}
    return needed | ({"ssm_beta.weight": (n_head, n_embd)} if has_beta else {})


def _vectors(description: Described, i: int) -> dict[str, int]:
    """Return the lengths of the norms and biases that a layer of this shape can have."""
    h, switches, shape = description.hyper, description.switches, description.hyper.layers[i]
    n_embd, n_expert, n_ff, recurrence = h.n_embd, h.n_expert, h.n_ff_expert, switches.recurrence
    q_norm, k_norm = (shape.n_q, shape.n_kv) if switches.wide_norms else (shape.head_dim, shape.head_dim)
    lengths = {"layer_output_scale.weight": 1}
    if shape.mixer != NO_MIXER:
        lengths["attn_norm.weight"] = n_embd
    if shape.mixer not in (NO_MIXER, RECURRENT):
        lengths["post_attention_norm.weight"] = n_embd
    if shape.has(ATTENTION):
        lengths |= {"attn_q.bias": shape.n_q, "attn_k.bias": shape.n_kv, "attn_v.bias": shape.n_kv}
        lengths |= {"attn_q_norm.weight": q_norm, "attn_output.bias": n_embd, "attn_sinks.weight": shape.n_head}
        lengths |= {"attn_k_norm.weight": k_norm} if h.stores_kv(i) else {}
    if h.has_mlp(i):
        lengths |= {"ffn_norm.weight": n_embd, "post_ffw_norm.weight": n_embd}
    if h.has_experts(i):
        lengths |= {
            "ffn_gate_inp.bias": n_expert,
            "exp_probs_b.bias": n_expert,
            "ffn_down_exps.scale": n_expert,
            "ffn_gate_inp.scale": n_embd,
        }
        lengths |= {"ffn_up_exps.bias": n_expert * n_ff, "ffn_down_exps.bias": n_expert * n_embd}
        lengths |= {} if switches.ungated else {"ffn_gate_exps.bias": n_expert * n_ff}
        lengths |= dict.fromkeys(("pre_ffw_norm_2.weight", "post_ffw_norm_1.weight", "post_ffw_norm_2.weight"), n_embd)
    if h.n_per_layer:
        lengths["post_norm.weight"] = n_embd
    if recurrence is not None and shape.has(RECURRENT):
        lengths["ssm_norm.weight"] = recurrence.n_norm
    return lengths


def _read_per_layer(reader: _Reader, h: Hyperparameters) -> PerLayer:
    n, width = h.n_layer, h.n_per_layer
    return PerLayer(
        reader.take(PER_LAYER_TABLE, n * h.n_vocab, width).reshape(h.n_vocab, n, width),
        reader.take("per_layer_model_proj.weight", n * width, h.n_embd),
        reader.take("per_layer_proj_norm.weight", width),
    )


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
