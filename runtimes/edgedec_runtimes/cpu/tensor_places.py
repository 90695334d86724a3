"""The tensors of a network: the number that the native library gives each kind, and which a layer can have."""

from collections.abc import Iterator
from dataclasses import dataclass

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.architectures.architecture import DISTANCE_BIAS, EXPERT_NORMS
from edgedec_runtimes.architectures.fused import PER_LAYER_TABLE
from edgedec_runtimes.architectures.reading import Described
from edgedec_runtimes.architectures.rope import DIVISORS
from edgedec_runtimes.cpu.native_tables import NUMBERS, numbers
from edgedec_runtimes.shared.hyperparameters import (
    ATTENTION,
    ATTENTION_AND_RECURRENT,
    CROSS,
    MEMORY,
    NO_MIXER,
    RECURRENT,
    Hyperparameters,
)
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION as CONVOLUTION_MIXER

EMBEDDING, OUTPUT = NUMBERS["EC_TOKEN_EMBD"], NUMBERS["EC_OUTPUT"]
PER_LAYER_ROWS, PER_LAYER_PROJECTION = NUMBERS["EC_PER_LAYER_ROWS"], NUMBERS["EC_PER_LAYER_PROJECTION"]
BETA, CONVOLUTION, ROUTER_NORM = NUMBERS["EC_MIX_BETA"], NUMBERS["EC_CONVOLUTION"], NUMBERS["EC_ROUTER_NORM"]
MIXERS = numbers("mixers", "EC_MIXER_") | {ATTENTION_AND_RECURRENT: NUMBERS["EC_MIXER_BOTH"]}
DISTANCES = NUMBERS["EC_DISTANCE_BIAS"]
CONVOLUTION_KERNELS = ("shortconv.conv.weight", "ssm_conv1d.weight")
GATES_AND_UPS = "ffn_gate_up_exps.weight"
_MATRICES = {
    "token_embd.weight": "TOKEN_EMBD",
    "output.weight": "OUTPUT",
    "attn_q.weight": "Q",
    "attn_k.weight": "K",
    "attn_v.weight": "V",
    "shortconv.c.weight": "Q",
    "shortconv.b.weight": "K",
    "shortconv.x.weight": "V",
    "ssm_mix.weight": "MIX",
    "ssm_gate.weight": "MIX_GATE",
    "ssm_alpha.weight": "MIX_ALPHA",
    "ssm_beta.weight": "MIX_BETA",
    "attn_output.weight": "ATTN_OUT",
    "shortconv.out_proj.weight": "ATTN_OUT",
    "ssm_out.weight": "MIX_OUT",
    "ffn_gate.weight": "GATE",
    "ffn_up.weight": "UP",
    "ffn_down.weight": "DOWN",
    "ffn_gate_inp.weight": "ROUTER",
    "ffn_gate_inp_shexp.weight": "SHARED_ROUTER",
    "ffn_gate_shexp.weight": "GATE",
    "ffn_up_shexp.weight": "UP",
    "ffn_down_shexp.weight": "DOWN",
    "inp_gate.weight": "PER_LAYER_GATE",
    "proj.weight": "PER_LAYER_OUT",
    # experts come last, as what a stage reads must lie together in the tile file
    "ffn_gate_exps.weight": "GATE_EXPERTS",
    "ffn_up_exps.weight": "UP_EXPERTS",
    "ffn_down_exps.weight": "DOWN_EXPERTS",
    GATES_AND_UPS: "GATE_EXPERTS",
    "per_layer_model_proj.weight": "PER_LAYER_PROJECTION",
    PER_LAYER_TABLE: "PER_LAYER_ROWS",
}
_VECTORS = {
    "output_norm.weight": "OUTPUT_NORM",
    "attn_norm.weight": "ATTN_NORM",
    "ffn_norm.weight": "FFN_NORM",
    "attn_q.bias": "Q_BIAS",
    "attn_k.bias": "K_BIAS",
    "attn_v.bias": "V_BIAS",
    "attn_q_norm.weight": "Q_NORM",
    "attn_k_norm.weight": "K_NORM",
    "post_attention_norm.weight": "POST_ATTN_NORM",
    "post_ffw_norm.weight": "POST_FFN_NORM",
    "attn_output.bias": "ATTN_OUT_BIAS",
    "attn_sinks.weight": "SINKS",
    "exp_probs_b.bias": "EXPERT_BIAS",
    **dict.fromkeys(CONVOLUTION_KERNELS, "CONVOLUTION"),
    "ffn_gate_inp.bias": "ROUTER_BIAS",
    "ffn_gate_exps.bias": "GATE_EXPERTS_BIAS",
    "ffn_up_exps.bias": "UP_EXPERTS_BIAS",
    "ffn_down_exps.bias": "DOWN_EXPERTS_BIAS",
    "per_layer_proj_norm.weight": "PER_LAYER_NORM",
    "post_norm.weight": "PER_LAYER_POST_NORM",
    "layer_output_scale.weight": "LAYER_SCALE",
    "ffn_gate_inp.scale": "ROUTER_NORM",
    "pre_ffw_norm_2.weight": "EXPERTS_NORM",
    "post_ffw_norm_1.weight": "POST_SHARED_NORM",
    "post_ffw_norm_2.weight": "POST_EXPERTS_NORM",
    "ffn_down_exps.scale": "EXPERT_SCALES",
    "ssm_dt.bias": "STATE_BIAS",
    "ssm_a": "STATE_RATE",
    "ssm_norm.weight": "STATE_NORM",
    "ssm_conv1d.bias": "CONVOLUTION_BIAS",
    "ssm_d": "STATE_PASSED",
    DISTANCE_BIAS: "DISTANCE_BIAS",
}
MATRICES = {name: NUMBERS[f"EC_{native}"] for name, native in _MATRICES.items()}
VECTORS = {name: NUMBERS[f"EC_{native}"] for name, native in _VECTORS.items()}
_PER_LAYER_MATRICES = ("per_layer_model_proj.weight", PER_LAYER_TABLE)
_GLOBAL = frozenset(
    {"token_embd.weight", "output.weight", "output_norm.weight", "per_layer_proj_norm.weight", *_PER_LAYER_MATRICES}
)
_OPTIONAL_MATRICES = frozenset({"output.weight", "ffn_gate_inp_shexp.weight", GATES_AND_UPS, "ssm_beta.weight"})
_OF_PER_LAYER = frozenset({"inp_gate.weight", "proj.weight", "post_norm.weight"})
_OF_KEYS = frozenset({"attn_k.weight", "attn_v.weight", "attn_k_norm.weight"})
_OF_QUERIES = frozenset({"attn_q.weight", "attn_output.weight"})
_OF_SEPARATE_EXPERTS = frozenset({"ffn_gate_exps.weight", "ffn_up_exps.weight"})
_DENSE = frozenset({"ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"})
_GATES = frozenset({"ffn_gate.weight", "ffn_gate_shexp.weight", "ffn_gate_exps.weight"})
_SHARED = frozenset(
    {"ffn_gate_inp_shexp.weight", "ffn_gate_shexp.weight", "ffn_up_shexp.weight", "ffn_down_shexp.weight"}
)
_EXPERTS = EXPERT_NORMS | {GATES_AND_UPS, "ffn_gate_inp.weight", "ffn_down_exps.weight"} | _OF_SEPARATE_EXPERTS

TILE_TYPES = frozenset(GGMLType) - {
    GGMLType.Q8_1,  # of activations, as Q8_K
    GGMLType.Q8_K,
    GGMLType.I8,
    GGMLType.I16,
    GGMLType.I32,
    GGMLType.I64,
    GGMLType.F64,
    GGMLType.NVFP4,
}


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


def place(description: Described) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
    """Return the matrices and the vectors with their places; refuse a file with a tensor too many or too few."""
    gguf, architecture = description.gguf, description.architecture
    matrices, vectors = [], []
    needed = {"output_norm.weight"} | architecture.needed
    used = set(DIVISORS) & architecture.vectors
    may_lack = _OPTIONAL_MATRICES | ({"attn_v.weight"} if description.switches.value_norm else frozenset())
    for name, layer, short in _names(description):
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


def _names(description: Described) -> Iterator[tuple[str, int, str]]:
    """Yield (name, layer, name within the layer) of every tensor that can be there, in the order of their use."""
    n, left_out = description.hyper, _GLOBAL | (_GATES if description.switches.ungated else set())
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
    role = n.layers[layer].role
    if (role == MEMORY and short in _OF_QUERIES) or (role in (MEMORY, CROSS) and short == DISTANCE_BIAS):
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
