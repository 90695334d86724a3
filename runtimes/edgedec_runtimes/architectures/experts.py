"""Mixtures of experts: the metadata keys and the shape of their layers, and how a router's scores become weights.

A router scores all experts for each token, the token goes through the best of them, and their outputs are summed by
weight (Shazeer et al. 2017, arXiv:1701.06538). Some architectures add an expert that all tokens go through.
"""

from dataclasses import replace

from edgedec.errors import UnsupportedModelError
from edgedec_runtimes.architectures.architecture import Switches
from edgedec_runtimes.architectures.header import Header

EXPERT_KEYS = frozenset({"expert_count", "expert_used_count", "expert_feed_forward_length", "expert_gating_func"})
SHARED_KEYS = EXPERT_KEYS | {"expert_shared_feed_forward_length"}
"""Those of architectures with a shared expert."""

_GATINGS = {1: "softmax", 2: "sigmoid", 3: "chosen"}
"""By llama.cpp's numbers of `expert_gating_func`."""


def mixed(header: Header, start: Switches, *, normed: bool, gating: str = "softmax") -> Switches:
    """Return the switches of a network with its routers' added.

    Args:
        start: The other switches.
        normed: Whether the weights of a token's experts are divided by their sum.
        gating: How scores become weights where the file does not say, by the names of Switches.expert_gating.

    Raises:
        UnsupportedModelError: The file names a way that is not known.
    """
    number = header.whole("expert_gating_func", 0)
    if number and number not in _GATINGS:
        raise UnsupportedModelError(
            f"{header.gguf.paths[0]}: expert_gating_func is {number}, none of {', '.join(map(str, _GATINGS))}; "
            "use the llamacpp runtime"
        )
    scale = header.number("expert_weights_scale", 0.0) or 1.0
    return replace(start, norm_experts=normed, expert_gating=_GATINGS.get(number, gating), expert_scale=scale)
