"""The network that a GGUF's header describes: its shape, the switches of its architecture, the place of each tensor.

The cpu runtime refuses a metadata key or a tensor that it does not know, as ignoring it could change a logit.
"""

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

from edgedec.errors import ModelFormatError, UnsupportedModelError
from edgedec.gguf.file import GGUF, TensorInfo
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.architectures.architecture import EXPERT_NORMS, Switches
from edgedec_runtimes.architectures.fused import PER_LAYER_TABLE
from edgedec_runtimes.architectures.reading import Described, read_description
from edgedec_runtimes.architectures.rope import DIVISORS
from edgedec_runtimes.shared.hyperparameters import (
    ATTENTION,
    ATTENTION_AND_RECURRENT,
    NO_MIXER,
    RECURRENT,
    Hyperparameters,
)
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION as CONVOLUTION_MIXER

# The numbers of native/edgedec_cpu.h.
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
_EXPERTS = EXPERT_NORMS | {
    *("ffn_gate_inp.weight", "ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight"),
    GATES_AND_UPS,
}

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

# The largest sizes that native/forward/model.cpp takes.
_LARGEST = {
    "n_per_layer": 2**17,
    "n_vocab": 2**24 - 1,
    "n_embd": 2**17,
    "n_layer": 2**12,
    "n_expert": 1024,
    "n_ff_expert": 2**20,
    "n_ff_shared": 2**20,
}
_LARGEST_OF_LAYER = {"n_head": 2**12, "head_dim": 2**12, "n_ff": 2**20}
_LARGEST_OF_STATE = 2**12
_MOST_TOKENS = 2**31 - 1
_LONGEST_CONVOLUTION = 16


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
    """Shape and switches of a model, and the places of its tensors.

    Attributes:
        switches: How the network differs from others of its shape.
        matrices, vectors: The tensors. Of fused ones, the parts have a place (edgedec_runtimes.architectures.fused).
    """

    switches: Switches
    matrices: tuple[Placed, ...]
    vectors: tuple[Placed, ...]

    def mixed_widths(self, layer: int) -> tuple[int, int, int]:
        """Return the elements of a layer's queries with their gates, of its keys, and of what its output matrix reads.

        Of a convolution they are those of each of its inputs.
        """
        shape = self.layers[layer]
        if not shape.has(ATTENTION):
            return self.n_embd, self.n_embd, self.n_embd
        return shape.n_q * (2 if self.switches.attention_gate else 1), shape.n_kv, shape.n_q


def read_network(gguf: GGUF) -> Network:
    """Return the shape, the switches and the tensors' places of a model, from its header.

    Raises:
        UnsupportedModelError: The cpu runtime does not run this file.
        ModelFormatError: The file contradicts itself.
        PluginError: Another package's architecture does not import.
    """
    found = read_description(gguf, "cpu")
    matrices, vectors = _place(found)
    network = Network(
        **{field.name: getattr(found.hyper, field.name) for field in fields(found.hyper)},
        switches=found.switches,
        matrices=matrices,
        vectors=vectors,
    )
    _check(found.gguf, network)
    return network


def _check(gguf: GGUF, n: Network) -> None:
    """Refuse sizes, numbers, types and shapes that the kernels do not take."""
    of_layers = [(layer, name, size) for layer in n.layers for name, size in _LARGEST_OF_LAYER.items()]
    for of, name, size in [*((n, name, size) for name, size in _LARGEST.items()), *of_layers]:
        if getattr(of, name) > size:
            raise _unsupported(gguf, f"{name} is {getattr(of, name)}, more than {size}")
    _check_numbers(gguf, n)
    for layer in n.layers:
        if layer.head_dim % 16 or n.n_embd % 16:
            raise _unsupported(
                gguf, f"heads of {layer.head_dim} or states of {n.n_embd} elements are no multiple of 16"
            )
    divisors = [gguf.tensors[name] for name in DIVISORS if name in gguf.tensors]
    for tensor in (*divisors, *(placed.tensor for placed in n.vectors)):
        n_dims = 2 if tensor.name.endswith(CONVOLUTION_KERNELS) else 1
        if tensor.type is not GGMLType.F32 or len(tensor.shape) != n_dims:
            raise _unsupported(gguf, f"tensor {tensor.name!r} is not {'a vector' if n_dims == 1 else 'rows'} of F32")
    for placed in n.matrices:
        if placed.which == PER_LAYER_ROWS and n.n_per_layer % placed.tensor.type.block_size:
            raise _unsupported(
                gguf, f"{placed.tensor.type.name} has no blocks of the {n.n_per_layer} elements that a layer gets"
            )
        if placed.tensor.type not in TILE_TYPES:
            raise _unsupported(gguf, f"tensor {placed.tensor.name!r} is {placed.tensor.type.name}")
    if n.n_ff_expert % 32 or n.n_expert_used > n.n_expert:
        raise _unsupported(gguf, f"experts are {n.n_ff_expert} wide, and {n.n_expert_used} of {n.n_expert} are used")
    expected = _shapes(n) | {tensor.name: (n.n_rot // 2,) for tensor in divisors}
    for name, shape in expected.items():
        if gguf.tensors[name].shape != shape:
            raise ModelFormatError(
                f"{gguf.paths[0]}: tensor {name!r} has the shape {gguf.tensors[name].shape}, expected {shape}; "
                "download the file again"
            )


def _shapes(n: Network) -> dict[str, tuple[int, ...]]:
    """Return the shape that each tensor must have, by name."""
    e, p_l, n_table = n.n_embd, n.n_per_layer, n.n_layer * n.n_vocab
    rows_of_experts = n.n_expert * n.n_ff_expert
    expected: dict[str, tuple[int, ...]] = {}
    for p in n.matrices:
        n_ff = n.dense_width(p.layer)
        n_q, n_kv, n_out = n.mixed_widths(p.layer)
        shapes = (
            *(
                (e, n.n_vocab),
                (e, n.n_vocab),
                (e, n_q),
                (e, n_kv),
                (e, n_kv),
                (n_out, e),
                (e, n_ff),
                (e, n_ff),
                (n_ff, e),
            ),
            *((e, n.n_expert), (e, 1), (e, rows_of_experts), (e, rows_of_experts), (n.n_ff_expert, n.n_expert * e)),
            *((p_l, n_table), (e, n.n_layer * p_l), (e, p_l), (p_l, e)),
            *_recurrent_shapes(n, p),
        )
        if p.tensor.name.endswith(GATES_AND_UPS):
            expected[p.tensor.name] = (e, 2 * rows_of_experts)
            continue
        expected[p.tensor.name] = shapes[p.which]
    of_experts = (n.n_expert, 0, n.n_expert, rows_of_experts, rows_of_experts, n.n_expert * e)
    for p in n.vectors:
        shape = n.layers[p.layer]
        norms = (shape.n_q, shape.n_kv) if n.switches.wide_norms else (shape.head_dim, shape.head_dim)
        of_layer = (shape.n_q, shape.n_kv, shape.n_kv, *norms, e, e, 0, e, shape.n_head)
        r = n.switches.recurrence
        of_states = (0,) * 5 if r is None else (r.n_head, r.n_head, r.n_norm, r.n_column, r.n_head)
        lengths = (e, e, e, *of_layer, *of_experts, p_l, e, 1, e, e, e, e, n.n_expert, *of_states)
        expected[p.tensor.name] = _kernels_shape(n, p.layer) if p.which == CONVOLUTION else (lengths[p.which],)
    return expected


def _recurrent_shapes(n: Network, placed: Placed) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of the matrices of a layer with a recurrent state; () where there is none.

    By the delta rule, the rows of alpha are those of both where there is no matrix beta.
    """
    r, e = n.switches.recurrence, n.n_embd
    if r is None:
        return ()
    is_joined = r.rule == "delta" and all(p.which != BETA or p.layer != placed.layer for p in n.matrices)
    alpha = (e, 2 * r.n_head if is_joined else r.n_head)
    return (e, r.n_column), (e, r.n_values), alpha, (e, r.n_head), (r.n_values, e)


def _kernels_shape(n: Network, layer: int) -> tuple[int, int]:
    """Return the shape of a convolution's kernels."""
    r = n.switches.recurrence
    if n.has_mixer(layer, RECURRENT) and r is not None:
        return r.length, r.n_column
    return n.switches.convolution_length, n.n_embd


def _check_numbers(gguf: GGUF, n: Network) -> None:
    """Refuse numbers of the metadata that are no positive (or no whole) factors."""
    s, rope, sliding = n.switches, n.switches.rope, n.switches.rope_sliding or n.switches.rope
    scales = ("embedding_scale", "residual_scale", "logit_scale", "attention_scale", "expert_scale", "glu_slope")
    factors = {
        "rms_epsilon": n.rms_epsilon,
        "rope_base": rope.base,
        "rope_base_sliding": sliding.base,
        "rope_scale": rope.scale,
        "rope_attention_factor": rope.attention_factor,
    } | {name: getattr(s, name) for name in scales}
    for name, value in factors.items():
        if not 0 < ctypes.c_float(value).value < math.inf:
            raise _unsupported(gguf, f"{name} is {value}, no positive number")
    for name in ("attention_softcap", "logit_softcap", "temperature_scale", "glu_limit"):
        if not 0 <= ctypes.c_float(getattr(s, name)).value < math.inf:
            raise _unsupported(gguf, f"{name} is {getattr(s, name)}, expected 0 or more")
    for name, size in (("sliding_window", s.sliding_window), ("temperature_tokens", s.temperature_tokens)):
        if size > _MOST_TOKENS:
            raise _unsupported(gguf, f"{name} is {size}, more than {_MOST_TOKENS}")
    if n.n_with(CONVOLUTION_MIXER) and not 2 <= s.convolution_length <= _LONGEST_CONVOLUTION:
        raise _unsupported(gguf, f"convolution_length is {s.convolution_length}, none from 2 to {_LONGEST_CONVOLUTION}")
    _check_recurrence(gguf, n)
    yarn = (rope.n_ctx_original, rope.beta_fast, rope.beta_slow, rope.base - 1)
    if rope.yarn and not (min(yarn) > 0 and 0 <= rope.log_multiplier <= 1):
        raise _unsupported(gguf, f"the numbers of yarn are {yarn} and {rope.log_multiplier}, expected positive ones")


def _check_recurrence(gguf: GGUF, n: Network) -> None:
    """Refuse recurrent states of sizes that native/forward/model.cpp does not take."""
    r = n.switches.recurrence
    if r is None:
        return
    if not 2 <= r.length <= _LONGEST_CONVOLUTION:
        raise _unsupported(gguf, f"the convolutions go over {r.length} tokens, not 2 to {_LONGEST_CONVOLUTION}")
    for name in ("n_head", "n_key_head", "n_key", "n_value"):
        if not 1 <= getattr(r, name) <= _LARGEST_OF_STATE:
            raise _unsupported(gguf, f"{name} of the states is {getattr(r, name)}, not 1 to {_LARGEST_OF_STATE}")
    if n.switches.attention_gate and n.switches.wide_norms:
        raise _unsupported(gguf, "gates of attention stand beside norms over all heads")


def _place(found: Described) -> tuple[tuple[Placed, ...], tuple[Placed, ...]]:
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
            raise _unsupported(gguf, f"tensor {name!r} is none that this architecture has")
    left = gguf.tensors.keys() - used
    if left:
        raise _unsupported(gguf, f"the cpu runtime has no use for tensor {min(left)!r}")
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


def _unsupported(gguf: GGUF, reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(f"{gguf.paths[0]}: {reason}; use the llamacpp runtime")
