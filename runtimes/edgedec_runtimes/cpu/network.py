"""The network that a GGUF's header describes: its shape, the switches of its architecture, the place of each tensor.

The cpu runtime refuses a metadata key or a tensor that it does not know, as ignoring it could change a logit.
"""

import ctypes
import math
from dataclasses import dataclass, fields

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import FLOATS, GGUF, once_per_header
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.architectures.architecture import DISTANCE_BIAS, Switches
from edgedec_runtimes.architectures.reading import read_description
from edgedec_runtimes.architectures.rope import DIVISORS
from edgedec_runtimes.cpu.tensor_places import (
    BETA,
    CONVOLUTION,
    CONVOLUTION_KERNELS,
    DISTANCES,
    GATES_AND_UPS,
    PER_LAYER_ROWS,
    TILE_TYPES,
    Placed,
    place,
    unsupported,
)
from edgedec_runtimes.shared.hyperparameters import (
    ATTENTION,
    RECURRENT,
    Hyperparameters,
)
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION as CONVOLUTION_MIXER

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
_MOST_RANGES = 128  # of distances


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


@once_per_header
def read_network(gguf: GGUF) -> Network:
    """Return the shape, the switches and the tensors' places of a model, from its header.

    Raises:
        UnsupportedModelError: The cpu runtime does not run this file.
        ModelFormatError: The file contradicts itself.
        PluginError: Another package's architecture does not import.
    """
    description = read_description(gguf, "cpu")
    matrices, vectors = place(description)
    network = Network(
        **{field.name: getattr(description.hyper, field.name) for field in fields(description.hyper)},
        switches=description.switches,
        matrices=matrices,
        vectors=vectors,
    )
    _check(description.gguf, network)
    return network


def _check(gguf: GGUF, n: Network) -> None:
    """Refuse sizes, numbers, types and shapes that the kernels do not take."""
    of_layers = [(layer, name, size) for layer in n.layers for name, size in _LARGEST_OF_LAYER.items()]
    for of, name, size in [*((n, name, size) for name, size in _LARGEST.items()), *of_layers]:
        if getattr(of, name) > size:
            raise unsupported(gguf, f"{name} is {getattr(of, name)}, more than {size}")
    _check_numbers(gguf, n)
    for layer in n.layers:
        if layer.head_dim % 16 or n.n_embd % 16:
            raise unsupported(gguf, f"heads of {layer.head_dim} or states of {n.n_embd} elements are no multiple of 16")
    divisors = [gguf.tensors[name] for name in DIVISORS if name in gguf.tensors]
    for tensor in (*divisors, *(placed.tensor for placed in n.vectors)):
        is_table = tensor.name.endswith(DISTANCE_BIAS)
        n_dims = 2 if is_table or tensor.name.endswith(CONVOLUTION_KERNELS) else 1
        if tensor.type not in (FLOATS if is_table else (GGMLType.F32,)) or len(tensor.shape) != n_dims:
            raise unsupported(gguf, f"tensor {tensor.name!r} is not {'a vector' if n_dims == 1 else 'rows'} of F32")
        if is_table and (tensor.shape[-1] % 4 or not 0 < tensor.shape[-1] <= _MOST_RANGES):
            raise unsupported(gguf, f"{tensor.shape[-1]} ranges of distances are no multiple of 4 up to {_MOST_RANGES}")
    for placed in n.matrices:
        if placed.which == PER_LAYER_ROWS and n.n_per_layer % placed.tensor.type.block_size:
            raise unsupported(
                gguf, f"{placed.tensor.type.name} has no blocks of the {n.n_per_layer} elements that a layer gets"
            )
        if placed.tensor.type not in TILE_TYPES:
            raise unsupported(gguf, f"tensor {placed.tensor.name!r} is {placed.tensor.type.name}")
    if n.n_ff_expert % 32 or n.n_expert_used > n.n_expert:
        raise unsupported(gguf, f"experts are {n.n_ff_expert} wide, and {n.n_expert_used} of {n.n_expert} are used")
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
        vocabulary = ((e, n.n_vocab), (e, n.n_vocab))
        attention = ((e, n_q), (e, n_kv), (e, n_kv), (n_out, e))
        dense = ((e, n_ff), (e, n_ff), (n_ff, e))
        gates, experts = ((e, n.n_expert), (e, 1)), (e, rows_of_experts)
        sparse = (*gates, experts, experts, (n.n_ff_expert, n.n_expert * e))
        by_layer = ((p_l, n_table), (e, n.n_layer * p_l), (e, p_l), (p_l, e))
        shapes = (*vocabulary, *attention, *dense, *sparse, *by_layer, *_recurrent_shapes(n, p))
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
        lengths = (e, e, e, *of_layer, *of_experts, p_l, e, 1, e, e, e, e, n.n_expert, *of_states, 0)
        expected[p.tensor.name] = _kernels_shape(n, p.layer) if p.which == CONVOLUTION else (lengths[p.which],)
        if p.which == DISTANCES:
            expected[p.tensor.name] = (shape.n_head, p.tensor.shape[-1])
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
            raise unsupported(gguf, f"{name} is {value}, no positive number")
    for name in ("attention_softcap", "logit_softcap", "temperature_scale", "glu_limit"):
        if not 0 <= ctypes.c_float(getattr(s, name)).value < math.inf:
            raise unsupported(gguf, f"{name} is {getattr(s, name)}, expected 0 or more")
    for name, size in (("sliding_window", s.sliding_window), ("temperature_tokens", s.temperature_tokens)):
        if size > _MOST_TOKENS:
            raise unsupported(gguf, f"{name} is {size}, more than {_MOST_TOKENS}")
    if n.n_with(CONVOLUTION_MIXER) and not 2 <= s.convolution_length <= _LONGEST_CONVOLUTION:
        raise unsupported(gguf, f"convolution_length is {s.convolution_length}, none from 2 to {_LONGEST_CONVOLUTION}")
    _check_recurrence(gguf, n)
    yarn = (rope.n_ctx_original, rope.beta_fast, rope.beta_slow, rope.base - 1)
    if rope.yarn and not (min(yarn) > 0 and 0 <= rope.log_multiplier <= 1):
        raise unsupported(gguf, f"the numbers of yarn are {yarn} and {rope.log_multiplier}, expected positive ones")


def _check_recurrence(gguf: GGUF, n: Network) -> None:
    """Refuse recurrent states of sizes that native/forward/model.cpp does not take."""
    r = n.switches.recurrence
    if r is None:
        return
    if not 2 <= r.length <= _LONGEST_CONVOLUTION:
        raise unsupported(gguf, f"the convolutions go over {r.length} tokens, not 2 to {_LONGEST_CONVOLUTION}")
    for name in ("n_head", "n_key_head", "n_key", "n_value"):
        if not 1 <= getattr(r, name) <= _LARGEST_OF_STATE:
            raise unsupported(gguf, f"{name} of the states is {getattr(r, name)}, not 1 to {_LARGEST_OF_STATE}")
    if n.switches.attention_gate and n.switches.wide_norms:
        raise unsupported(gguf, "gates of attention stand beside norms over all heads")
