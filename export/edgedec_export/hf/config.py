"""Read a checkpoint's config.json, for the architectures that can be converted.

A setting that GGUF cannot express is refused, because leaving it out could change a logit. Names and defaults are those
of the classes LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig, Gemma3TextConfig, GraniteConfig, Olmo2Config and
SmolLM3Config in Hugging Face's transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec_export.hf.denoising import Denoising, read_denoising, usual_settings
from edgedec_runtimes.weights.config_values import ConfigValues, llama3_divisors
from edgedec_runtimes.weights.safetensors import read_json

_MODEL_TYPES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma3", "granite", "olmo2", "smollm3")},
    "gemma3_text": "gemma3",
    "qwen3_moe": "qwen3moe",
    "Dream": "dream",
    "Fast_dLLM_Qwen": "qwen2",
    "sdar": "qwen3",
    "a2d-qwen2": "qwen2",
    "a2d-qwen3": "qwen3",
    "llada": "llada",
    "wedlm-qwen2": "qwen2",
    "wedlm-qwen3": "qwen3",
}
_SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "logit_scale": "logits_scaling",
    "residual_scale": "residual_multiplier",
}  # of granite: the metadata key, and the setting
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768},
    "dream": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
    "llada": {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096},
    "qwen3": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
    "gemma3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "head_dim": 256,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "granite": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048} | dict.fromkeys(_SCALES.values(), 1.0),
    "qwen3moe": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_key_value_heads": 4,
    },
    "olmo2": {"rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "smollm3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "num_key_value_heads": 4,
        "rope_theta": 2e6,
        "tie_word_embeddings": True,
    },
}
_UNROTATED_PERIOD = 4  # llama.cpp does not rotate every fourth layer of a smollm3
_ACTIVATIONS = {"gemma3": ("gelu_pytorch_tanh",)}
_REMEDY = (
    "edgedec does not convert this, and the model would write another text without it; use llama.cpp's "
    "convert_hf_to_gguf.py where it supports this"
)
_ROLES = ("bos", "eos", "mask")
GEMMA_PERIOD = 6  # every sixth layer sees everything (gemma 3 report, arXiv:2503.19786)
GEMMA_27B_LAYERS = 62  # by which llama.cpp recognizes the 27B; it scales that model's attention in another way
# Settings that must have this value, or be absent.
_EXPECTED: dict[str, Any] = {
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping", "quantization_config"), None),
    **dict.fromkeys(("rope_interleaved", "use_bidirectional_attention", "use_sliding_window"), False),
    "partial_rotary_factor": 1.0,
}


@dataclass(frozen=True, slots=True)
class Config:
    """A model's shape and settings.

    Attributes:
        architecture: GGUF's name for it.
        n_vocab: Rows of the embedding matrix.
        rope_factor: Positions are divided by it; in gemma3 only in the layers that see all tokens.
        rope_divisors: float32[head_dim // 2] that each frequency is divided by ("llama3" scaling), or None.
        sliding_window: Number of tokens that most layers of gemma3 see; 0 in other architectures.
        n_expert, n_expert_used, n_ff_expert: Experts of a layer and of a token, and their width; 0 in dense models.
        scales: Factors of a granite, by metadata key below the architecture's name.
        tied: The head is the embedding matrix.
        token_ids: For "bos", "eos" and "mask", the first token id that the configuration names.
        denoising: What makes it a diffusion language model; None for another one.
    """

    architecture: str
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_layer: int
    n_head: int
    n_head_kv: int
    head_dim: int
    n_ff: int
    rms_epsilon: float
    rope_base: float
    rope_base_sliding: float
    rope_factor: float
    rope_divisors: NDArray[np.float32] | None
    sliding_window: int
    n_expert: int
    n_expert_used: int
    n_ff_expert: int
    scales: Mapping[str, float]
    tied: bool
    token_ids: Mapping[str, int]
    denoising: Denoising | None


def read_config(folder: Path) -> Config:
    """Read config.json in a folder.

    Raises:
        ModelNotFoundError: There is no such file.
        ModelFormatError: The file is damaged, or lacks a value that every model has.
        UnsupportedModelError: The architecture, or one of its settings, cannot be converted.
        StorageError: The file cannot be read.
    """
    path = folder / "config.json"
    raw = usual_settings(read_json(path))
    model_type = raw.get("model_type")
    architecture = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise UnsupportedModelError(
            f"{path}: model_type is {str(model_type)[:40]!r}, expected one of bert, {', '.join(_MODEL_TYPES)}; for "
            "others use llama.cpp's convert_hf_to_gguf.py"
        )
    text = raw.get("text_config")
    merged = raw | text if model_type == "gemma3" and isinstance(text, dict) else raw
    # Null stands for the default, as it does in the classes that write these files.
    raw_values = {key: value for key, value in merged.items() if value is not None}
    values = _values(path, _DEFAULTS[architecture] | raw_values)
    return _config(values, raw)


def _values(path: Path, values: dict[str, Any]) -> ConfigValues:
    return ConfigValues(path, values, _REMEDY)


def _architecture(values: ConfigValues) -> str:
    return _MODEL_TYPES[values.values["model_type"]]


def _config(values: ConfigValues, raw: dict[str, Any]) -> Config:
    _check_switches(values)
    architecture = _architecture(values)
    n_embd, n_head = values.whole("hidden_size"), values.whole("num_attention_heads")
    head_dim = values.whole("head_dim", n_embd // n_head)
    rope = _rope(values, head_dim)
    config = Config(
        architecture=architecture,
        n_ctx_train=values.whole("max_position_embeddings"),
        n_vocab=values.whole("vocab_size"),
        n_embd=n_embd,
        n_layer=values.whole("num_hidden_layers", most=4096),
        n_head=n_head,
        n_head_kv=values.whole("num_key_value_heads", n_head),
        head_dim=head_dim,
        n_ff=values.whole("intermediate_size"),
        rms_epsilon=values.number("rms_norm_eps"),
        rope_base=rope.base,
        rope_base_sliding=rope.base_sliding,
        rope_factor=rope.factor,
        rope_divisors=rope.divisors,
        sliding_window=values.whole("sliding_window") if architecture == "gemma3" else 0,
        **_experts(values),
        scales={key: values.number(name) for key, name in _SCALES.items() if architecture == "granite"},
        tied=values.flag("tie_word_embeddings", False),
        token_ids={role: i for role in _ROLES if (i := _first_id(raw, values, f"{role}_token_id")) is not None},
        denoising=read_denoising(values),
    )
    if config.n_head % config.n_head_kv or config.head_dim % 2:
        values.fail(f"{config.n_head} heads of size {config.head_dim} cannot share {config.n_head_kv} key-value heads")
    if architecture == "gemma3":
        _check_gemma(values, config)
    if architecture == "smollm3":
        _check_rotated_layers(values, config)
    return config


def _experts(values: ConfigValues) -> dict[str, int]:
    """Return the fields of Config about experts; refuse a mixture that llama.cpp would compute in another way."""
    names = {"n_expert": "num_experts", "n_expert_used": "num_experts_per_tok", "n_ff_expert": "moe_intermediate_size"}
    if _architecture(values) != "qwen3moe":
        return dict.fromkeys(names, 0)
    if not values.flag("norm_topk_prob", False):
        values.refuse("norm_topk_prob", "expected true")
    for key, expected in (("decoder_sparse_step", 1), ("mlp_only_layers", [])):
        if values.values.get(key, expected) != expected:
            values.refuse(key, f"expected {expected}, which gives every layer experts")
    counts = {field: values.whole(name, most=2**24) for field, name in names.items()}
    if counts["n_expert_used"] > counts["n_expert"]:
        values.fail(f"{counts['n_expert_used']} of {counts['n_expert']} experts are used")
    return counts


def _first_id(raw: dict[str, Any], values: ConfigValues, key: str) -> int | None:
    """Return the token id under a key, the first one where the key has a list; None where it has none."""
    token_id = raw.get(key, values.values.get(key))
    token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
    return token_id if type(token_id) is int and token_id >= 0 else None


def _check_switches(values: ConfigValues) -> None:
    for key, expected in _EXPECTED.items():
        if values.values.get(key, expected) != expected:
            values.refuse(key, f"expected {expected}")
    activation = values.values.get("hidden_activation", values.values.get("hidden_act"))
    allowed = _ACTIVATIONS.get(_architecture(values), ("silu", "swish"))
    if activation is not None and activation not in allowed:
        values.refuse(
            "hidden_activation" if "hidden_activation" in values.values else "hidden_act", f"expected {allowed[0]}"
        )
    kinds = values.values.get("layer_types")
    if _architecture(values) != "gemma3" and isinstance(kinds, list) and set(map(str, kinds)) != {"full_attention"}:
        values.refuse("layer_types", "expected full_attention in every layer")


def _check_gemma(values: ConfigValues, config: Config) -> None:
    """Refuse a gemma3 whose layer types or attention scale differ from what llama.cpp assumes."""
    period = values.values.get("sliding_window_pattern", values.values.get("_sliding_window_pattern", GEMMA_PERIOD))
    kinds = values.values.get("layer_types")
    full = [i % GEMMA_PERIOD == GEMMA_PERIOD - 1 for i in range(config.n_layer)]
    if period != GEMMA_PERIOD:
        values.refuse("sliding_window_pattern", f"expected {GEMMA_PERIOD}")
    if kinds is not None and kinds != ["full_attention" if every else "sliding_attention" for every in full]:
        values.refuse("layer_types", f"expected every {GEMMA_PERIOD}th layer to have full attention")
    large = config.n_layer == GEMMA_27B_LAYERS
    scalar = config.n_embd // config.n_head if large else config.head_dim
    if values.number("query_pre_attn_scalar") != scalar:
        values.refuse("query_pre_attn_scalar", f"expected {scalar}")


def _check_rotated_layers(values: ConfigValues, config: Config) -> None:
    """Refuse a smollm3 that rotates other layers than llama.cpp assumes."""
    rotated = [int((i + 1) % _UNROTATED_PERIOD != 0) for i in range(config.n_layer)]
    if "no_rope_layers" in values.values:
        layers = values.values["no_rope_layers"]
        if not isinstance(layers, list) or layers[: config.n_layer] != rotated:
            values.refuse("no_rope_layers", f"expected 0 for every {_UNROTATED_PERIOD}th layer and 1 for the others")
    elif values.values.get("no_rope_layer_interval", _UNROTATED_PERIOD) != _UNROTATED_PERIOD:
        values.refuse("no_rope_layer_interval", f"expected {_UNROTATED_PERIOD}")


@dataclass(frozen=True, slots=True)
class _Rope:
    base: float
    base_sliding: float
    factor: float = 1.0
    divisors: NDArray[np.float32] | None = None


def _rope(values: ConfigValues, head_dim: int) -> _Rope:
    """Read the rotary embedding, in the form of transformers 4 (rope_scaling) or 5 (rope_parameters)."""
    parameters = values.table("rope_parameters")
    sliding = parameters.get("sliding_attention")
    if isinstance(parameters.get("full_attention"), dict):
        parameters = parameters["full_attention"]
    parameters = parameters or values.table("rope_scaling")
    rope = _values(values.path, parameters)
    base = rope.number("rope_theta", values.number("rope_theta", 10000.0))
    base_sliding = values.number("rope_local_base_freq", base)
    if isinstance(sliding, dict):
        local = _values(values.path, sliding)
        base_sliding = local.number("rope_theta", base_sliding)
        if local.values.get("rope_type", "default") != "default":
            local.refuse("rope_type", "expected default in the layers of sliding attention")
    if rope.values.get("partial_rotary_factor", 1.0) != 1.0:
        rope.refuse("partial_rotary_factor", "expected 1.0")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return _Rope(base, base_sliding)
    if kind == "linear":
        return _Rope(base, base_sliding, rope.number("factor"))
    if kind == "llama3" and _architecture(values) == "llama":
        return _Rope(base, base_sliding, divisors=llama3_divisors(rope, base, head_dim))
    return rope.refuse(
        "rope_type" if "rope_type" in rope.values else "type", "expected default, linear, or llama3 in llama"
    )
