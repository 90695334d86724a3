"""What a network does with positions: which layers see a sliding window, and how fast rotary embeddings turn."""

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.cpu.network import Network


def is_local(network: Network, layer: int) -> bool:
    """Tell whether a layer sees a sliding window instead of all tokens before it."""
    return network.sliding_pattern > 0 and (layer + 1) % network.sliding_pattern != 0


def local_layers(network: Network) -> list[int]:
    """Return the numbers of the layers with a sliding window, from 0."""
    return [layer for layer in range(network.n_layer) if is_local(network, layer)]


def frequencies(network: Network, factors: NDArray[np.float32] | None) -> NDArray[np.float64]:
    """Return float64[n_rot/2]: a position times these are its angles, in the arithmetic of the cpu runtime.

    Args:
        factors: float32[n_rot/2] that the frequencies are divided by (Llama 3), or None.
    """
    scaled = _powers(network.rope_base, network.n_rot) * float(np.float32(network.rope_scale))
    return scaled if factors is None else scaled / factors.astype(np.float64)


def sliding_frequencies(network: Network) -> NDArray[np.float64]:
    """Return float64[n_rot/2] for layers with a sliding window, which have a base of their own and no scaling."""
    return _powers(network.rope_base_sliding, network.n_rot)


def _powers(base: float, n_rot: int) -> NDArray[np.float64]:
    return np.power(float(np.float32(base)), -2.0 * np.arange(n_rot // 2) / n_rot)
