"""The tensors of a network: the number that native/edgedec_cpu.h gives each kind, and which a layer can have."""

from collections.abc import Iterator
from dataclasses import dataclass

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.architectures.architecture import EXPERT_NORMS
from edgedec_runtimes.architectures.fused import PER_LAYER_TABLE
from edgedec_runtimes.architectures.reading import Described
from edgedec_runtimes.architectures.rope import DIVISORS
from edgedec_runtimes.shared.hyperparameters import (
    ATTENTION,
    ATTENTION_AND_RECURRENT,
    NO_MIXER,
    RECURRENT,
    Hyperparameters,
)
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION as CONVOLUTION_MIXER

EMBEDDING, OUTPUT, CONVOLUTION, ROUTER_NORM = 0, 1, 14, 22
PER_LAYER_ROWS, PER_LAYER_PROJECTION, BETA = 14, 15, 21
MIXERS = {NO_MIXER: 0, ATTENTION: 1, CONVOLUTION_MIXER: 2, RECURRENT: 3, ATTENTION_AND_RECURRENT: 4}
CONVOLUTION_KERNELS = ("shortconv.conv.weight", "ssm_conv1d.weight")
GATES_AND_UPS = "ffn_gate_up_exps.weight"
MATRICES = {
    "token_embd.weight": EMBEDDING,
    "output.weight": OUTPUT,
    "attn_q.weight": 2,
    "attn_k.weight": 3,
    "attn_v.weight": 4,
    "shortconv.c.weight": 2,
    "shortconv.b.weight": 3,
    "shortconv.x.weight": 4,
    "ssm_mix.weight": 18,
    "ssm_gate.weight": 19,
    "ssm_alpha.weight": 20,
    "ssm_beta.weight": BETA,
    "attn_output.weight": 5,
    "shortconv.out_proj.weight": 5,
    "ssm_out.weight": 22,
    "ffn_gate.weight": 6,
    "ffn_up.weight": 7,
    "ffn_down.weight": 8,
    "ffn_gate_inp.weight": 9,
    "ffn_gate_inp_shexp.weight": 10,
    "ffn_gate_shexp.weight": 6,
    "ffn_up_shexp.weight": 7,
    "ffn_down_shexp.weight": 8,
    "inp_gate.weight": 16,
    "proj.weight": 17,
    "ffn_gate_exps.weight": 11,  # experts come last, as what a stage reads must lie together in the tile file
    "ffn_up_exps.weight": 12,
    "ffn_down_exps.weight": 13,
    GATES_AND_UPS: 11,
    "per_layer_model_proj.weight": PER_LAYER_PROJECTION,
    PER_LAYER_TABLE: PER_LAYER_ROWS,
}
VECTORS = {
    "output_norm.weight": 0,
    "attn_norm.weight": 1,
    "ffn_norm.weight": 2,
    "attn_q.bias": 3,
    "attn_k.bias": 4,
    "attn_v.bias": 5,
    "attn_q_norm.weight": 6,
    "attn_k_norm.weight": 7,
    "post_attention_norm.weight": 8,
    "post_ffw_norm.weight": 9,
    "attn_output.bias": 11,
    "attn_sinks.weight": 12,
    "exp_probs_b.bias": 13,
    **dict.fromkeys(CONVOLUTION_KERNELS, CONVOLUTION),
    "ffn_gate_inp.bias": 15,
    "ffn_gate_exps.bias": 16,
    "ffn_up_exps.bias": 17,
    "ffn_down_exps.bias": 18,
    "per_layer_proj_norm.weight": 19,
    "post_norm.weight": 20,
    "layer_output_scale.weight": 21,
    "ffn_gate_inp.scale": ROUTER_NORM,
    "pre_ffw_norm_2.weight": 23,
    "post_ffw_norm_1.weight": 24,
    "post_ffw_norm_2.weight": 25,
    "ffn_down_exps.scale": 26,
    "ssm_dt.bias": 27,
    "ssm_a": 28,
    "ssm_norm.weight": 29,
    "ssm_conv1d.bias": 30,
    "ssm_d": 31,
}
_PER_LAYER_MATRICES = ("per_layer_model_proj.weight", PER_LAYER_TABLE)
_GLOBAL = frozenset(
    {"token_embd.weight", "output.weight", "output_norm.weight", "per_layer_proj_norm.weight", *_PER_LAYER_MATRICES}
)
_OPTIONAL_MATRICES = frozenset({"output.weight", "ffn_gate_inp_shexp.weight", GATES_AND_UPS, "ssm_beta.weight"})
_OF_PER_LAYER = frozenset({"inp_gate.weight", "proj.weight", "post_norm.weight"})
_OF_KEYS = frozenset({"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"})
_OF_SEPARATE_EXPERTS = frozenset({"ffn_gate_exps.weight", "ffn_up_exps.weight"})
_DENSE = frozenset({"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"})
_GATES = frozenset({"ffn_gate.weight", "ffn_gate_shexp.weight", "ffn_gate_exps.weight"})
_SHARED = frozenset(
    {"ffn_gate_inp_shexp.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"}
)
_EXPERTS = EXPERT_NORMS | {GATES_AND_UPS, "ffn_gate_inp.weight", "ffn_down_exps.weight"} | _OF_SEPARATE_EXPERTS

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
        GGMLType.Q1_0,
        GGMLType.Q2_0,
    }
)


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


def place(found: Described) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """Return the matrices and the vectors with their places; refuse a file with a tensor too many or too few."""
    gguf, architecture = found.gguf, found.architecture
    matrices, vectors = [], []
    needed = {"output_norm.weight"} | architecture.needed
    used = set(DIVISORS) & architecture.vectors
    may_lack = _OPTIONAL_MATRICES | ({"attn_v.weight"} if found.switches.value_norm else frozenset())
    for name, layer, short in _names(found):
        tensor = gguf.tensors.get(name)
        if short in _OF_SEPARATE_EXPERTS and f"blk.{layer}.{GATES_AND_UPS}" in gguf.tensors:
            continue
        if tensor is None:
            if short in (MATRICES.keys() | {*CONVOLUTION_KERNELS}) - may_lack or short in needed:
                raise ModelFormatError(f"{gguf.paths[0]}: it has no tensor {name!r}; download the file again")
            continue
        used.add(name)
        if short in MATRICES:
            matrices.append(Placed(tensor, MATRICES[short], layer))
        elif short in needed or short in architecture.vectors:
            vectors.append(Placed(tensor, VECTORS[short], layer))
        else:
            raise unsupported(gguf, f"tensor {name!r} is none that this architecture has")
    left = gguf.tensors.keys() - used
    if left:
        raise unsupported(gguf, f"the cpu runtime has no use for tensor {min(left)!r}")
    return tuple(matrices), tuple(vectors)


def _names(found: Described) -> Iterator[tuple[str, int, str]]:
    """Yield (name, layer, name within the layer) of every tensor that can be there, in the order of their use."""
    n, left_out = found.hyper, _GLOBAL | (_GATES if found.switches.ungated else set())
    yield "token_embd.weight", 0, "token_embd.weight"
    for layer in range(n.n_layer):
        for short in (*MATRICES, *VECTORS):
            if short not in left_out and _is_possible(n, layer, short):
                yield f"blk.{layer % n.n_block}.{short}", layer, short
    for name in ("per_layer_proj_norm.weight", *_PER_LAYER_MATRICES) if n.n_per_layer else ():
        yield name, 0, name
    yield "output_norm.weight", 0, "output_norm.weight"
    yield "output.weight", 0, "output.weight"


def _is_possible(n: Hyperparameters, layer: int, short: str) -> bool:
    """Return whether a layer of this shape can have a tensor."""
    if short == "attn_norm.weight":  # before every mixer
        return not n.has_mixer(layer, NO_MIXER)
    if short in _OF_KEYS and not n.stores_kv(layer):
        return False
    if short in _OF_PER_LAYER:
        return n.n_per_layer > 0
    of_mixer = {"attn_": ATTENTION, "shortconv.": CONVOLUTION_MIXER, "ssm_": RECURRENT}
    for prefix, kind in of_mixer.items():
        if short.startswith(prefix):
            return n.has_mixer(layer, kind)
    if n.has_experts(layer):
        return short not in _DENSE and (n.n_ff_shared > 0 or short not in _SHARED)
    if n.dense_width(layer):
        return short not in _EXPERTS | _SHARED
    return not short.startswith(("ffn_", "pre_ffw_", "post_ffw_"))


def unsupported(gguf: GGUF, reason: str) -> UnsupportedModelError:
    """Return the error of a file whose network the cpu runtime does not run."""
    return UnsupportedModelError(f"{gguf.paths[0]}: {reason}; use the llamacpp runtime")
