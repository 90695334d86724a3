"""What the configuration of a diffusion language model says: its blocks, whether rows are shifted, and usual names.

Model types are those of Dream (arXiv:2508.15487), Fast-dLLM v2 (arXiv:2509.26328), SDAR (arXiv:2510.06303), LLaDA
(arXiv:2502.09992), WeDLM (arXiv:2512.22737) and of the models that github.com/ZHZisZZ/dllm makes of others ("a2d-...").
"""

import logging
import re
from dataclasses import dataclass
from typing import Any

from edgedec_runtimes.weights.config_values import ConfigValues

logger = logging.getLogger("edgedec.export")
_SHIFTED = {
    **dict.fromkeys(("Dream", "Fast_dLLM_Qwen"), True),
    **dict.fromkeys(("sdar", "a2d-qwen2", "a2d-qwen3", "llada", "wedlm-qwen2", "wedlm-qwen3"), False),
}
_WINDOW = 16  # of WeDLM, whose checkpoints don't say it
_LLADA_SETTINGS = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "mlp_hidden_size": "intermediate_size",
    "weight_tying": "tie_word_embeddings",
    "max_sequence_length": "max_position_embeddings",
    "activation_type": "hidden_act",
}
_LLADA_EXPECTED: dict[str, Any] = {
    "block_type": "llama",
    "layer_norm_type": "rms",
    "rope": True,
    **dict.fromkeys(("alibi", "include_bias", "include_qkv_bias", "attention_layer_norm"), False),
    **dict.fromkeys(("input_emb_norm", "scale_logits"), False),
    **dict.fromkeys(("clip_qkv", "multi_query_attention"), None),
    "block_group_size": 1,
}
_LLADA_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_out": "self_attn.o_proj",
    "ff_norm": "post_attention_layernorm",
    **{f"{x}_proj": f"self_attn.{x}_proj" for x in "qkv"},
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}
_LLADA_OUTER = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
_LLADA_NAME = re.compile(r"model\.transformer\.(?:blocks\.(\d{1,6})\.)?(\w+)(\.weight)")


@dataclass(frozen=True, slots=True)
class Denoising:
    """A diffusion language model.

    Attributes:
        block: How many positions see each other; None where all do.
        shift: Whether a row says what stands behind it.
        window: How many positions are denoised together where rows see only what is before them; None where they don't.
    """

    block: int | None
    shift: bool
    window: int | None = None


def read_denoising(values: ConfigValues) -> Denoising | None:
    """Return what makes a model a diffusion language model; None for another one (raises where no block is named).

    Checkpoints of "a2d-..." don't say how they were trained. A `block_size` that is added to config.json says it.
    """
    kind = values.values["model_type"]
    if kind not in _SHIFTED:
        return None
    for name, expected in _LLADA_EXPECTED.items() if kind == "llada" else ():
        if values.values.get(name, expected) != expected:
            values.refuse(name, f"expected {expected}")
    key = "bd_size" if kind == "Fast_dLLM_Qwen" else "block_size"
    window = _WINDOW if kind.startswith("wedlm-") else None
    has_blocks = kind in ("Fast_dLLM_Qwen", "sdar") or (kind.startswith("a2d-") and key in values.values)
    if kind.startswith("a2d-") and not has_blocks:
        logger.warning(
            "config.json has no block_size, so each row sees the whole text; if the checkpoint was trained in blocks "
            '(bd3lm), add "block_size": 32 there, or what it was trained with, and export it again'
        )
    return Denoising(values.whole(key) if has_blocks else None, _SHIFTED[kind], window)


def usual_settings(raw: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration with the names of settings that most models have."""
    if raw.get("model_type") == "wedlm":
        return raw | {"model_type": "wedlm-qwen3" if raw.get("qk_norm") is True else "wedlm-qwen2"}
    if raw.get("model_type") != "llada":
        return raw
    return raw | {usual: raw[name] for name, usual in _LLADA_SETTINGS.items() if name in raw}


def usual_name(name: str) -> str:
    """Return the name that most models have for a tensor of a LLaDA; other names as they are.

    >>> usual_name("model.transformer.blocks.3.ff_out.weight"), usual_name("model.transformer.ff_out.weight")
    ('model.layers.3.mlp.down_proj.weight', 'lm_head.weight')
    """
    match = _LLADA_NAME.fullmatch(name)
    if match is None:
        return name
    layer, short, end = match.groups()
    usual = (_LLADA_OUTER if layer is None else _LLADA_TENSORS).get(short)
    return name if usual is None else f"{usual}{end}" if layer is None else f"model.layers.{layer}.{usual}{end}"
