"""The element types of keys and values: the models that can use them, and the bytes of a token.

`q8_0` and `q4_0` are integers of 8 and 4 bits with a float16 scale for every 32 elements. `q8_0/q4_0` has the first for
keys and the second for values, which take fewer bits well. `gear` also has 4 bits, and keeps one element of 16, the
largest ones of a token's head, as float16 beside them: the sparse part of GEAR (Kang et al. 2024, arXiv:2403.05527).
native/kernels/kernels.h defines the layouts.
"""

from edgedec.errors import argument
from edgedec_runtimes.cpu.network import Network
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION

PAGE_TOKENS = 64
WHOLE_PAGES = 6  # those of the longest forward (256 rows) and two before them
BLOCK = 32
LONGEST_HEAD = 512
OUTLIERS_OF = 16  # one of so many elements is kept as float16
_BITS = {"f16": (16, 16), "q8_0": (8, 8), "q8_0/q4_0": (8, 4), "q4_0": (4, 4), "gear": (4, 4)}  # of keys, of values


def refusal(network: Network, kv_type: str) -> str | None:
    """Return None where the model's keys and values can be kept as `kv_type`, else the reason why they can't."""
    odd = {layer.head_dim for layer in network.layers if layer.head_dim % BLOCK or layer.head_dim > LONGEST_HEAD}
    if kv_type == "f16" or not odd:
        return None
    return (
        f"its heads have {min(odd)} elements, which is no multiple of {BLOCK} up to {LONGEST_HEAD}, so that "
        f"keys and values can't be kept as {kv_type}; use {argument('kv_type')} 'f16'"
    )


def token_bytes(network: Network, kv_type: str) -> int:
    """Return the bytes of a token's keys and values in all layers."""
    rotation = 4 * network.n_rot if kv_type != "f16" and _bias_lies_apart(network) else 0
    return sum(layer.n_head_kv * _pair_bytes(layer.head_dim, kv_type) for layer in network.kept_layers) + rotation


def _pair_bytes(head_dim: int, kv_type: str) -> int:
    """Return the bytes of the key and the value of one head."""
    n_bytes = head_dim * sum(_BITS[kv_type]) // 8
    if kv_type != "f16":
        n_bytes += head_dim // BLOCK * 4
    if kv_type == "gear":
        n_bytes += head_dim // OUTLIERS_OF * 6
    return n_bytes


def column_bytes(network: Network, n_ctx: int) -> int:
    """Return the bytes that a session of n_ctx tokens holds for the short convolutions of a model.

    The newest pages of 64 tokens hold the columns of all their tokens, older ones the last few
    (native/forward/short_conv.h).
    """
    n, n_layers = network, network.n_with(CONVOLUTION)
    if not n_layers:
        return 0
    n_pages = -(-n_ctx // PAGE_TOKENS)
    n_whole = min(n_pages, WHOLE_PAGES)
    n_columns = n_whole * PAGE_TOKENS + (n_pages - n_whole) * (n.switches.convolution_length - 1)
    return n_columns * n_layers * n.n_embd * 4 + n_ctx * (4 + 2 * n.n_layer)


def _bias_lies_apart(network: Network) -> bool:
    """Return whether keys are kept without their bias, next to its rotations (kv_shape in native/api.cpp)."""
    names = {placed.tensor.name.partition(".")[2].partition(".")[2] for placed in network.vectors}
    return "attn_k.bias" in names and "attn_k_norm.weight" not in names and not any(network.switches.sliding)
