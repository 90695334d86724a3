"""The network that a GGUF's header describes: its shape, the switches of its architecture, the place of each tensor.

The cpu runtime refuses a metadata key or a tensor that it does not know, as ignoring it could change a logit.
"""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.gguf.metadata import get_float, get_text
from edgedec.gguf.model_info import describe
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.shared.hyperparameters import Hyperparameters, read_hyperparameters

# The numbers of native/edgedec_cpu.h.
EMBEDDING, OUTPUT = 0, 1
MATRICES = {
    "token_embd.weight": EMBEDDING,
    "output.weight": OUTPUT,
    "attn_q.weight": 2,
    "attn_k.weight": 3,
    "attn_v.weight": 4,
    "attn_output.weight": 5,
    "ffn_gate.weight": 6,
    "ffn_up.weight": 7,
    "ffn_down.weight": 8,
}
VECTORS = {
    "output_norm.weight": 0,
    "rope_freqs.weight": 1,
    "attn_norm.weight": 2,
    "ffn_norm.weight": 3,
    "attn_q.bias": 4,
    "attn_k.bias": 5,
    "attn_v.bias": 6,
    "attn_q_norm.weight": 7,
    "attn_k_norm.weight": 8,
    "post_attention_norm.weight": 9,
    "post_ffw_norm.weight": 10,
}
_GLOBAL = frozenset({"token_embd.weight", "output.weight", "output_norm.weight", "rope_freqs.weight"})
_OPTIONAL_MATRICES = frozenset({"output.weight"})
_NEEDED_VECTORS = frozenset({"output_norm.weight", "attn_norm.weight", "ffn_norm.weight"})

TILE_TYPES = frozenset(
    {
        GGMLType.F32,
        GGMLType.F16,
        GGMLType.BF16,
        GGMLType.Q4_0,
        GGMLType.Q4_1,
        GGMLType.Q5_0,
        GGMLType.Q5_1,
        GGMLType.Q8_0,
        GGMLType.Q2_K,
        GGMLType.Q3_K,
        GGMLType.Q4_K,
        GGMLType.Q5_K,
        GGMLType.Q6_K,
        GGMLType.IQ1_S,
        GGMLType.IQ1_M,
        GGMLType.IQ2_XXS,
        GGMLType.IQ2_XS,
        GGMLType.IQ2_S,
        GGMLType.IQ3_XXS,
        GGMLType.IQ3_S,
        GGMLType.IQ4_NL,
        GGMLType.IQ4_XS,
        GGMLType.TQ1_0,
        GGMLType.TQ2_0,
        GGMLType.MXFP4,
    }
)

# The largest sizes that native/model.cpp takes.
_LARGEST = {"n_vocab": 2**24 - 1, "n_embd": 2**17, "n_head": 2**12, "head_dim": 2**12, "n_ff": 2**20}


@dataclass(frozen=True, slots=True)
class Architecture:
    """What distinguishes an architecture.

    Attributes:
        interleaved: Rotary embedding pairs neighbouring elements of a head, not its two halves.
        vectors: Vectors that a model may have beside the norms that all architectures have.
        keys: Metadata keys below the architecture's name, beside those of every llama-like decoder.
        gelu: The feed-forward activation is GELU, not SiLU.
        scaled_embedding: Embeddings are multiplied by the square root of their length.
    """

    interleaved: bool = False
    vectors: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    gelu: bool = False
    scaled_embedding: bool = False


_BIASES = frozenset({"attn_q.bias", "attn_k.bias", "attn_v.bias"})
_HEAD_NORMS = frozenset({"attn_q_norm.weight", "attn_k_norm.weight"})
_LINEAR_SCALING = frozenset({"rope.scaling.type", "rope.scaling.factor"})
ARCHITECTURES = {
    "llama": Architecture(interleaved=True, vectors=_BIASES | {"rope_freqs.weight"}, keys=_LINEAR_SCALING),
    "qwen2": Architecture(vectors=_BIASES, keys=_LINEAR_SCALING),
    "qwen3": Architecture(vectors=_HEAD_NORMS, keys=_LINEAR_SCALING),
    "gemma3": Architecture(
        vectors=_HEAD_NORMS | {"post_attention_norm.weight", "post_ffw_norm.weight"},
        keys=_LINEAR_SCALING | {"attention.sliding_window", "rope.freq_base_swa"},
        gelu=True,
        scaled_embedding=True,
    ),
}
_GEMMA_PATTERN = 6  # every sixth layer sees everything (gemma 3 report, arXiv:2503.19786)
_GEMMA_BASE_SLIDING = 10000.0


@dataclass(frozen=True, slots=True)
class Placed:
    """A tensor of the file and its place in the network.

    Attributes:
        which: Its number in MATRICES or VECTORS.
        layer: Its layer; 0 for a tensor outside the layers.
    """

    tensor: TensorInfo
    which: int
    layer: int


@dataclass(frozen=True, slots=True)
class Network(Hyperparameters):
    """Shape and switches of a model, by the names of ec_config, and the places of its tensors."""

    rope_interleaved: bool
    gelu: bool
    sliding_window: int
    sliding_pattern: int
    embedding_scale: float
    attention_scale: float
    rope_base_sliding: float
    rope_scale: float
    matrices: tuple[Placed, ...]
    vectors: tuple[Placed, ...]


def read_network(gguf: GGUF) -> Network:
    """Return the shape, the switches and the tensors' places of a model, from its header.

    Raises:
        UnsupportedModelError: The cpu runtime does not run this file.
        ModelFormatError: The file contradicts itself.
    """
    name = get_text(gguf, "general.architecture") or "none"
    if name not in ARCHITECTURES:
        raise _unsupported(gguf, f"the architecture is {name!r}; the cpu runtime runs {', '.join(ARCHITECTURES)}")
    architecture, info = ARCHITECTURES[name], describe(gguf)
    hyper = read_hyperparameters(gguf, info, "cpu", architecture.keys)
    if info.rope_scaling not in (None, "none", "linear"):
        raise _unsupported(gguf, f"rope scaling {info.rope_scaling!r} is not linear")
    base_sliding = get_float(gguf, f"{name}.rope.freq_base_swa")
    matrices, vectors = _place(gguf, architecture, hyper.n_layer)
    network = Network(
        **{field.name: getattr(hyper, field.name) for field in fields(hyper)},
        rope_interleaved=architecture.interleaved,
        gelu=architecture.gelu,
        sliding_window=info.sliding_window,
        sliding_pattern=_GEMMA_PATTERN if info.sliding_window else 0,
        embedding_scale=math.sqrt(hyper.n_embd) if architecture.scaled_embedding else 1.0,
        attention_scale=1 / math.sqrt(hyper.head_dim),
        rope_base_sliding=_GEMMA_BASE_SLIDING if base_sliding is None else base_sliding,
        rope_scale=1 / info.rope_factor if info.rope_scaling == "linear" and info.rope_factor else 1.0,
        matrices=matrices,
        vectors=vectors,
    )
    _check(gguf, network)
    return network


def _check(gguf: GGUF, n: Network) -> None:
    """Refuse sizes, numbers, types and shapes that the kernels do not take."""
    for name, size in _LARGEST.items():
        if getattr(n, name) > size:
            raise _unsupported(gguf, f"{name} is {getattr(n, name)}, more than {size}")
    for name in ("rms_epsilon", "rope_base", "rope_base_sliding", "rope_scale"):
        if not 0 < ctypes.c_float(getattr(n, name)).value < math.inf:
            raise _unsupported(gguf, f"{name} is {getattr(n, name)}, no positive number")
    if n.head_dim % 16 or n.n_embd % 16:
        raise _unsupported(gguf, f"heads of {n.head_dim} or states of {n.n_embd} elements are no multiple of 16")
    if n.architecture == "gemma3" and n.n_layer == 62:  # the 27B scales attention by its width
        raise _unsupported(gguf, "this size of gemma 3 scales its attention in another way")
    for placed in n.vectors:
        if placed.tensor.type is not GGMLType.F32 or len(placed.tensor.shape) != 1:
            raise _unsupported(gguf, f"tensor {placed.tensor.name!r} is not a vector of F32")
    for placed in n.matrices:
        if placed.tensor.type not in TILE_TYPES:
            raise _unsupported(gguf, f"tensor {placed.tensor.name!r} is {placed.tensor.type.name}")
    n_q, n_kv = n.n_head * n.head_dim, n.n_head_kv * n.head_dim
    shapes = (
        *((n.n_embd, n.n_vocab), (n.n_embd, n.n_vocab), (n.n_embd, n_q), (n.n_embd, n_kv), (n.n_embd, n_kv)),
        *((n_q, n.n_embd), (n.n_embd, n.n_ff), (n.n_embd, n.n_ff), (n.n_ff, n.n_embd)),
    )
    lengths = (n.n_embd, n.n_rot // 2, n.n_embd, n.n_embd, n_q, n_kv, n_kv, n.head_dim, n.head_dim, n.n_embd, n.n_embd)
    expected: dict[str, tuple[int, ...]] = {p.tensor.name: shapes[p.which] for p in n.matrices}
    expected |= {placed.tensor.name: (lengths[placed.which],) for placed in n.vectors}
    for name, shape in expected.items():
        if gguf.tensors[name].shape != shape:
            raise ModelFormatError(
                f"{gguf.paths[0]}: tensor {name!r} has the shape {gguf.tensors[name].shape}, expected {shape}; "
                "download the file again"
            )


def _place(gguf: GGUF, architecture: Architecture, n_layer: int) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """Return the matrices and the vectors with their places; refuse a file with a tensor too many or too few."""
    matrices, vectors, used = [], [], set()
    allowed = _NEEDED_VECTORS | architecture.vectors
    for name, layer, short in _names(n_layer):
        tensor = gguf.tensors.get(name)
        if tensor is None:
            if short in MATRICES.keys() - _OPTIONAL_MATRICES or short in _NEEDED_VECTORS:
                raise ModelFormatError(f"{gguf.paths[0]}: it has no tensor {name!r}; download the file again")
            continue
        used.add(name)
        if short in MATRICES:
            matrices.append(Placed(tensor, MATRICES[short], layer))
        elif short in allowed:
            vectors.append(Placed(tensor, VECTORS[short], layer))
        else:
            raise _unsupported(gguf, f"tensor {name!r} is none that this architecture has")
    left = gguf.tensors.keys() - used
    if left:
        raise _unsupported(gguf, f"the cpu runtime has no use for tensor {min(left)!r}")
    return tuple(matrices), tuple(vectors)


def _names(n_layer: int) -> Iterator[tuple[str, int, str]]:
    """Yield (name, layer, name within the layer) of every tensor that can be there, in the order of their use."""
    yield "token_embd.weight", 0, "token_embd.weight"
    yield "rope_freqs.weight", 0, "rope_freqs.weight"
    for layer in range(n_layer):
        for short in (*MATRICES, *VECTORS):
            if short not in _GLOBAL:
                yield f"blk.{layer}.{short}", layer, short
    yield "output_norm.weight", 0, "output_norm.weight"
    yield "output.weight", 0, "output.weight"


def _unsupported(gguf: GGUF, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{gguf.paths[0]}: {reason}; use the llamacpp runtime")
