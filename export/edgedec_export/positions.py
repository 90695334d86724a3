"""What a network does with positions: which layers see a sliding window, and how fast rotary embeddings turn."""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec_runtimes.architectures.architecture import SINKS, Switches
from edgedec_runtimes.architectures.rope import LONG_DIVISORS, SHORT_DIVISORS, Rope, turns
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.cpu.tensor_places import MATRICES, VECTORS

_HONOURED = frozenset(
    """
    rope rope_interleaved rope_sliding unrotated temperature_scale temperature_tokens attention_scale attention_softcap
    wide_norms sliding_window sliding norms_after_rope embedding_scale residual_scale logit_scale logit_softcap
    scaled_vectors
    """.split()  # scaled_vectors, as graphs take tokens only: the capability `vector_rows` says so
)
_HONOURED_VALUES = frozenset({("activation", "gelu")})
_OTHER_LAYERS = tuple(
    """
    ffn_gate_inp exp_probs_b _exps. _shexp. shortconv. ssm_ per_layer_ inp_gate. proj.weight post_norm.
    layer_output_scale pre_ffw_norm_ post_ffw_norm_
    """.split()
)
_OPERATIONS = frozenset(
    name for name in (*MATRICES, *VECTORS) if name != SINKS and not any(part in name for part in _OTHER_LAYERS)
)
_REMEDY = "run the GGUF itself, with the cpu runtime"


def require_architecture(gguf: GGUF, network: Network, architectures: tuple[str, ...]) -> None:
    """Refuse a network of another architecture than `architectures`, or whose positions are scaled by yarn or longrope.

    Raises:
        UnsupportedModelError: It is one of those.
    """
    if network.architecture not in architectures:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the architecture is {network.architecture!r}; this export takes "
            f"{', '.join(architectures)}: {_REMEDY}"
        )
    rope = network.switches.rope
    if rope.yarn or rope.attention_factor != 1:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: its rope scaling is yarn or longrope, and this export takes only linear scaling and "
            f"divisors: {_REMEDY}"
        )


def require_operations(gguf: GGUF, network: Network) -> None:
    """Refuse a network that a graph for onnxruntime would compute otherwise than the cpu runtime.

    Raises:
        UnsupportedModelError: It has divisors for short and for long contexts, a tensor or a switch that graphs lack.
    """
    require_text_decoder(gguf, may_embed=True)  # a graph's rows see what is before them
    for name in (SHORT_DIVISORS, LONG_DIVISORS):
        if name in gguf.tensors:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: it has {name!r}, by which positions turn otherwise in long contexts, and a graph "
                f"serves contexts of every length: {_REMEDY}"
            )
    if network.n_loops > 1:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: its layers run {network.n_loops} times, and a graph runs them once: {_REMEDY}"
        )
    for placed in (*network.matrices, *network.vectors):
        short = placed.tensor.name.split(".", 2)[-1] if placed.tensor.name.startswith("blk.") else placed.tensor.name
        if short not in _OPERATIONS:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: it has {placed.tensor.name!r}, for which graphs have no operation: {_REMEDY}"
            )
    for switch in fields(Switches):
        value = getattr(network.switches, switch.name)
        is_honoured = switch.name in _HONOURED or (switch.name, value) in _HONOURED_VALUES
        if not is_honoured and value != switch.default:
            raise UnsupportedModelError(
                f"{gguf.paths[0]}: the architecture {network.architecture!r} sets {switch.name!r}, which graphs do not "
                f"have: {_REMEDY}"
            )


def local_layers(network: Network) -> list[int]:
    """Return the numbers of the layers with a sliding window, from 0."""
    return [layer for layer in range(network.n_layer) if network.switches.slides(layer)]


def frequencies(network: Network, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """Return float64[n_rot/2]: a position times these are its angles, in the arithmetic of the cpu runtime.

    Args:
        factors: float32[n_rot/2] that the frequencies are divided by (Llama 3), or None.
    """
    return turns(network.switches.rope, factors).frequencies


def sliding_frequencies(network: Network) -> NDArray[np.float64]:
    """Return float64[n_rot/2] for layers with a sliding window, which have a base of their own and no scaling."""
    sliding: Rope = network.switches.rope_sliding or network.switches.rope
    return turns(sliding).frequencies
