"""The names of a checkpoint's tensors in a GGUF, and the rows that are in another order there.

llama.cpp rotates the queries and keys of some architectures in pairs of neighbours, Hugging Face in halves of a head,
so their rows are reordered.
"""

import re
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

OUTER_NAMES = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
BIASES = {f"self_attn.{x}_proj.bias": f"attn_{x}.bias" for x in "qkv"}
_HEAD_NORMS = {f"self_attn.{x}_norm.weight": f"attn_{x}_norm.weight" for x in "qk"}
_GEMMA_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "pre_feedforward_layernorm.weight": "ffn_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_OLMO2_NORMS = {
    "post_attention_layernorm.weight": "post_attention_norm.weight",
    "post_feedforward_layernorm.weight": "post_ffw_norm.weight",
}
_EXPERTS = {
    **{f"mlp.experts.{x}_proj.weight": f"ffn_{x}_exps.weight" for x in ("gate", "up", "down")},
    "mlp.gate.weight": "ffn_gate_inp.weight",
}
LAYER_NAMES: Mapping[str, Mapping[str, str]] = {
    "llama": _LAYER | BIASES,
    "qwen2": _LAYER | BIASES,
    "dream": _LAYER | BIASES,
    "llada": _LAYER,
    "qwen3": _LAYER | _HEAD_NORMS,
    "gemma3": _LAYER | _HEAD_NORMS | _GEMMA_NORMS,
    "granite": _LAYER,
    "olmo2": {name: ours for name, ours in _LAYER.items() if ours != "attn_norm.weight"} | _HEAD_NORMS | _OLMO2_NORMS,
    "qwen3moe": {name: ours for name, ours in _LAYER.items() if not name.startswith("mlp.")} | _HEAD_NORMS | _EXPERTS,
    "smollm3": _LAYER,
}
"""By architecture: the name of a tensor in a layer of a checkpoint, and its name in a layer of a GGUF.

The names of experts are those without their numbers.
"""

IN_NEIGHBOURS = frozenset({"llama", "llada", "granite", "smollm3"})
LAYER_NAME = re.compile(r"layers\.(0|[1-9]\d{0,5})\.(.+)")
# A multimodal gemma3 has its text model under one of these names, beside an image encoder.
TEXT_PREFIXES = ("language_model.model.", "model.language_model.", "model.", "language_model.")


def gguf_name(architecture: str, name: str) -> str | None:
    """Return the name in a GGUF of a checkpoint's tensor, not of a single expert; None where there is none.

    >>> gguf_name("llama", "model.layers.3.self_attn.q_proj.weight")
    'blk.3.attn_q.weight'
    """
    prefix = next((prefix for prefix in TEXT_PREFIXES if name.startswith(prefix)), "")
    rest = name[len(prefix) :]
    layer = LAYER_NAME.fullmatch(rest)
    ours = LAYER_NAMES.get(architecture, {}).get(layer[2]) if layer else None
    return OUTER_NAMES.get(rest) if ours is None or layer is None else f"blk.{layer[1]}.{ours}"


def in_neighbours(architecture: str, name: str) -> bool:
    """Return whether the rows of a GGUF's tensor are reordered: those of queries and keys, to pairs of neighbours."""
    return architecture in IN_NEIGHBOURS and name.split(".", 2)[-1].startswith(("attn_q.", "attn_k."))


def to_neighbours(rows: NDArray[np.float32], head_dim: int) -> NDArray[np.float32]:
    """Reorder float32[n_heads * head_dim, n] from halves of a head to pairs of neighbours.

    >>> to_neighbours(np.arange(4, dtype=np.float32).reshape(4, 1), 4).ravel()
    array([0., 2., 1., 3.], dtype=float32)
    """
    heads = rows.reshape(-1, 2, head_dim // 2, rows.shape[1])
    return heads.swapaxes(1, 2).reshape(rows.shape)
