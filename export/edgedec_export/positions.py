"""What a network does with positions: which layers see a sliding window, and how fast rotary embeddings turn."""

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec.gguf.file import GGUF
from edgedec_runtimes.architectures.rope import Rope, turns
from edgedec_runtimes.cpu.network import Network

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
"""Architectures of which exported graphs have every operation."""


def require_known(gguf: GGUF, network: Network, architectures: tuple[str, ...] = ARCHITECTURES) -> None:
    """Refuse a network that exported graphs would compute otherwise than the cpu runtime.

    Raises:
        UnsupportedModelError: The architecture is none of `architectures`, or positions are scaled by yarn or longrope.
    """
    if network.architecture not in architectures:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: the architecture is {network.architecture!r}; this export takes "
            f"{', '.join(architectures)}: run the GGUF itself, with the cpu runtime"
        )
    rope = network.switches.rope
    if rope.yarn or rope.attention_factor != 1:
        raise UnsupportedModelError(
            f"{gguf.paths[0]}: its rope scaling is yarn or longrope, and exports take only linear scaling and "
            "divisors: run the GGUF itself, with the cpu runtime"
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
