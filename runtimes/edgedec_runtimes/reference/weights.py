"""The weights of a llama or qwen2 GGUF as float32 arrays.

The reference runtime refuses a metadata key or a tensor that it does not know, as ignoring it could change a logit.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, GGMLType
from edgedec.gguf.metadata import get_text
from edgedec.gguf.model_info import describe
from edgedec_runtimes.shared.hyperparameters import Hyperparameters, read_hyperparameters

ROPE_IS_INTERLEAVED = {"llama": True, "qwen2": False}
"""Whether rotary embedding pairs neighbours of a head (NORM in llama.cpp) or its halves (NEOX), by architecture."""

_DTYPES: dict[GGMLType, np.dtype[np.floating]] = {GGMLType.F32: np.dtype("<f4"), GGMLType.F16: np.dtype("<f2")}


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer; matrices are f32[n_out, n_in], norms and biases f32[n]."""

    attn_norm: NDArray[np.float32]
    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]
    q_bias: NDArray[np.float32] | None
    k_bias: NDArray[np.float32] | None
    v_bias: NDArray[np.float32] | None
    attn_output: NDArray[np.float32]
    ffn_norm: NDArray[np.float32]
    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder; `output` is `embedding` where the file ties them."""

    hyper: Hyperparameters
    embedding: NDArray[np.float32]
    layers: tuple[Layer, ...]
    output_norm: NDArray[np.float32]
    output: NDArray[np.float32]

    def arrays(self) -> Iterator[NDArray[np.float32]]:
        """Yield every array once, in a fixed order."""
        yield self.embedding
        for layer in self.layers:
            yield from (array for name in fields(layer) if (array := getattr(layer, name.name)) is not None)
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


def read_shape(gguf: GGUF) -> Hyperparameters:
    """Return the shape of a model that the reference runs, from its header alone.

    Raises:
        UnsupportedModelError: The reference does not run this file.
        ModelFormatError: The file contradicts itself.
    """
    path = gguf.paths[0]
    architecture = get_text(gguf, "general.architecture") or "none"
    if architecture not in ROPE_IS_INTERLEAVED:
        raise UnsupportedModelError(
            f"{path}: architecture {architecture!r}; the reference runtime runs {' and '.join(ROPE_IS_INTERLEAVED)}: "
            "use the llamacpp runtime"
        )
    for tensor in gguf.tensors.values():
        if tensor.type not in _DTYPES:
            raise UnsupportedModelError(
                f"{path}: tensor {tensor.name!r} is {tensor.type.name}, but the reference runtime reads only F32 and "
                "F16: use the llamacpp runtime"
            )
    return read_hyperparameters(gguf, describe(gguf), "reference")


def read_weights(gguf: GGUF, hyper: Hyperparameters) -> Weights:
    """Return all tensors of a file as float32 arrays.

    Raises:
        ModelFormatError: A tensor is missing, or its shape contradicts the hyperparameters.
        UnsupportedModelError: The reference runtime has no use for a tensor.
    """
    left = set(gguf.tensors)

    def take(name: str, *shape: int) -> NDArray[np.float32]:
        left.discard(name)
        return _read_tensor(gguf, name, shape)

    def bias(name: str, n: int) -> NDArray[np.float32] | None:
        return take(name, n) if name in gguf.tensors else None

    h, n_q = hyper, hyper.n_head * hyper.head_dim
    layers = []
    for p in (f"blk.{i}" for i in range(h.n_layer)):
        layer = Layer(
            attn_norm=take(f"{p}.attn_norm.weight", h.n_embd),
            q=take(f"{p}.attn_q.weight", n_q, h.n_embd),
            k=take(f"{p}.attn_k.weight", h.n_kv, h.n_embd),
            v=take(f"{p}.attn_v.weight", h.n_kv, h.n_embd),
            q_bias=bias(f"{p}.attn_q.bias", n_q),
            k_bias=bias(f"{p}.attn_k.bias", h.n_kv),
            v_bias=bias(f"{p}.attn_v.bias", h.n_kv),
            attn_output=take(f"{p}.attn_output.weight", h.n_embd, n_q),
            ffn_norm=take(f"{p}.ffn_norm.weight", h.n_embd),
            gate=take(f"{p}.ffn_gate.weight", h.n_ff, h.n_embd),
            up=take(f"{p}.ffn_up.weight", h.n_ff, h.n_embd),
            down=take(f"{p}.ffn_down.weight", h.n_embd, h.n_ff),
        )
        layers.append(layer)
    embedding = take("token_embd.weight", h.n_vocab, h.n_embd)
    tied = "output.weight" not in gguf.tensors
    output_norm = take("output_norm.weight", h.n_embd)
    output = embedding if tied else take("output.weight", h.n_vocab, h.n_embd)
    if left:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the reference runtime has no use for tensor {min(left)!r}: use the llamacpp runtime"
        )
    return Weights(hyper, embedding, tuple(layers), output_norm, output)


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
