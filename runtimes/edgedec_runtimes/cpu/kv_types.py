"""The element types of keys and values: the models that can use them, and the bytes of a token.

`q8_0` and `q4_0` are integers of 8 and 4 bits with a float16 scale for every 32 elements. `gear` also has 4 bits, and
keeps one element of 16, the largest ones of a token's head, as float16 beside them: the sparse part of GEAR (Kang et
al. 2024, arXiv:2403.05527). native/kernels.h defines the layouts.
"""

from edgedec.errors import argument
from edgedec_runtimes.cpu.network import Network

BLOCK = 32
LONGEST_HEAD = 256
OUTLIERS_OF = 16  # one of so many elements is kept as float16
_BITS = {"f16": 16, "q8_0": 8, "q4_0": 4, "gear": 4}


def refusal(network: Network, kv_type: str) -> str | None:
    """Return None where the model's keys and values can be kept as `kv_type`, else the reason why they can't."""
    if kv_type == "f16" or (network.head_dim % BLOCK == 0 and network.head_dim <= LONGEST_HEAD):
        return None
    return (
        f"its heads have {network.head_dim} elements, which is no multiple of {BLOCK} up to {LONGEST_HEAD}, so that "
        f"keys and values can't be kept as {kv_type}; use {argument('kv_type')} 'f16'"
    )


def token_bytes(network: Network, kv_type: str) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    n = network
    vector = n.head_dim * _BITS[kv_type] // 8
    if kv_type != "f16":
        vector += n.head_dim // BLOCK * 2
    if kv_type == "gear":
        vector += n.head_dim // OUTLIERS_OF * 3
    rotation = 4 * n.n_rot if kv_type != "f16" and _bias_lies_apart(n) else 0
    return n.n_layer * n.n_head_kv * 2 * vector + rotation


def _bias_lies_apart(network: Network) -> bool:
    """Return whether keys are kept without their bias, next to its rotations (kv_shape in native/api.cpp)."""
    names = {placed.tensor.name.partition(".")[2].partition(".")[2] for placed in network.vectors}
    return "attn_k.bias" in names and "attn_k_norm.weight" not in names and not any(network.switches.sliding)
