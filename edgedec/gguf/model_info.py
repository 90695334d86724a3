"""What a GGUF says about its model: size, shape, quantization, context, tokenizer, recommended sampling."""

import math
from dataclasses import dataclass
from typing import Any, NoReturn

from edgedec.errors import RequestError
from edgedec.gguf.file import GGUF, ValueType
from edgedec.gguf.metadata import get_array, get_float, get_int, get_per_layer, get_text, refuse_missing
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.gguf.sampling_defaults import read_sampling_defaults
from edgedec.gguf.tensor_types import FILE_TYPE_GUESSED, FILE_TYPE_NAMES, GGMLType

__all__ = ["ModelInfo", "TypeShare", "describe", "kv_cache_bytes", "require_text_decoder"]

# llama.cpp stops at 512 layers; the other bounds are far above any model and keep sums exact.
_MAX_LAYERS = 1024
_MAX_HEADS = 2**16
_MAX_WIDTH = 2**24
_MAX_TOKENS = 2**31 - 1

# Every n-th layer has attention, the others a recurrent state, where the metadata does not say so itself.
_FULL_ATTENTION_INTERVAL = {"qwen3next": 4, "qwen35": 4, "qwen35moe": 4, "minimax-01": 8}
_NO_ATTENTION = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_STATE_KEYS = ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim")


@dataclass(frozen=True, slots=True)
class TypeShare:
    """The tensors of one type: how many, how large, and their share of all tensor bytes (0 to 1)."""

    type: GGMLType
    n_tensors: int
    n_bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the metadata and tensors of a model say; None where the file does not say it.

    Attributes:
        n_params: Number of weights in all tensors.
        n_bytes: Size of the file, or of all parts of a split one.
        quantization: The types of its tensors, the largest share first.
        quantization_label: What the quantizer was asked for ("Q4_K_M"), else the type with the largest share.
        n_ctx_train: Longest context it was trained for, in tokens.
        n_ctx_scaled: The same where the metadata scales positions (rope.scaling): the longest that is meant to work.
        n_head: Query heads by layer; 0 in layers without attention.
        n_head_kv: Key and value heads by layer; 0 in layers without attention.
        key_length: Length of a key head (the larger one where windowed layers differ).
        value_length: Length of a value head (likewise).
        kv_width: Numbers the KV cache holds per token, by layer: 0 where the layer has no cache of its own.
        has_recurrent_state: Some layers keep a state of fixed size, which no KV cache size includes and which
            cannot be rolled back by dropping tokens.
        sliding_window: Tokens that windowed layers see, where there are any.
        n_expert: Experts per layer; 0 for a dense model.
        sampling_defaults: Recommended sampling: SamplingParams(**sampling_defaults) takes it.
    """

    architecture: str
    name: str | None
    n_params: int
    n_bytes: int
    quantization: tuple[TypeShare, ...]
    quantization_label: str
    n_ctx_train: int | None
    n_ctx_scaled: int | None
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int
    kv_width: tuple[int, ...]
    has_recurrent_state: bool
    n_vocab: int
    sliding_window: int | None
    n_expert: int
    n_expert_used: int
    tokenizer_model: str | None
    has_chat_template: bool
    license: str | None
    sampling_defaults: dict[str, Any]


def describe(gguf: GGUF) -> ModelInfo:
    """Read what a model's metadata and tensors say about it.

    Raises:
        UnsupportedModelError: The file holds no text decoder and lacks what every model says.
        ModelFormatError: Something every text model says is missing, or a value has the wrong type or range.
    """
    architecture = _required_text(gguf, "general.architecture")
    n_layer = _required_int(gguf, f"{architecture}.block_count", at_most=_MAX_LAYERS)
    n_embd = _required_int(gguf, f"{architecture}.embedding_length", at_most=_MAX_WIDTH)
    heads = _heads(gguf, architecture, n_layer, n_embd)
    quantization = _quantization(gguf)
    window = get_int(gguf, f"{architecture}.attention.sliding_window", at_most=_MAX_TOKENS)
    n_ctx_train = get_int(gguf, f"{architecture}.context_length", at_most=_MAX_TOKENS)
    return ModelInfo(
        architecture=architecture,
        name=get_text(gguf, "general.name"),
        n_params=sum(tensor.n_elements for tensor in gguf.tensors.values()),
        n_bytes=gguf.n_bytes,
        quantization=quantization,
        quantization_label=_quantization_label(gguf, quantization),
        n_ctx_train=n_ctx_train,
        n_ctx_scaled=None if n_ctx_train is None else _scaled_context(gguf, architecture, n_ctx_train),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=heads.n_head,
        n_head_kv=heads.n_head_kv,
        key_length=heads.key_length,
        value_length=heads.value_length,
        kv_width=heads.kv_width,
        has_recurrent_state=_has_recurrent_state(gguf, architecture),
        n_vocab=_n_vocab(gguf, architecture),
        sliding_window=window or None,
        n_expert=get_int(gguf, f"{architecture}.expert_count", at_most=_MAX_WIDTH) or 0,
        n_expert_used=get_int(gguf, f"{architecture}.expert_used_count", at_most=_MAX_WIDTH) or 0,
        tokenizer_model=get_text(gguf, "tokenizer.ggml.model"),
        has_chat_template=bool(get_text(gguf, "tokenizer.chat_template")),
        license=get_text(gguf, "general.license"),
        sampling_defaults=read_sampling_defaults(gguf),
    )


def kv_cache_bytes(info: ModelInfo, n_ctx: int, bytes_per_element: float = 2.0) -> int:
    """Return the size of a KV cache for n_ctx tokens, of the attention layers only.

    Every attention layer counts for all n_ctx tokens, windowed ones and compressed ones (MLA) with keys and values,
    so this is the most that a runtime needs. The state of recurrent layers (`has_recurrent_state`) does not count:
    its size is fixed.

    Example: SmolLM2 135M, 30 layers x 3 heads x (64 + 64) = 11,520 numbers per token: 23,040 bytes in F16.

    Args:
        bytes_per_element: 2.0 for F16; 34 / 32 for Q8_0.

    Raises:
        RequestError: n_ctx is negative or above 2^31 - 1, or bytes_per_element is not positive.
    """
    if not 0 <= n_ctx <= _MAX_TOKENS:
        raise RequestError(f"n_ctx is {n_ctx}; it must be 0 to {_MAX_TOKENS}")
    if not 0 < bytes_per_element <= 8:
        raise RequestError(f"bytes_per_element is {bytes_per_element}; it must be above 0 and at most 8")
    return math.ceil(sum(info.kv_width) * n_ctx * bytes_per_element)


def _scaled_context(gguf: GGUF, architecture: str, n_ctx_train: int) -> int:
    """Return the context that positions are scaled to; files differ in whether `context_length` is that already."""
    scaling = f"{architecture}.rope.scaling"
    factor = get_float(gguf, f"{scaling}.factor")
    if get_text(gguf, f"{scaling}.type") in (None, "none") or factor is None or not 1 < factor < _MAX_TOKENS:
        return n_ctx_train
    n_original = get_int(gguf, f"{scaling}.original_context_length", at_most=_MAX_TOKENS) or n_ctx_train
    return max(n_ctx_train, min(int(factor * n_original), _MAX_TOKENS))


@dataclass(frozen=True, slots=True)
class _Heads:
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int
    kv_width: tuple[int, ...]


def _heads(gguf: GGUF, architecture: str, n_layer: int, n_embd: int) -> _Heads:
    """Read the attention heads, and work out the width of each layer's KV cache."""
    prefix = f"{architecture}.attention."
    n_head = get_per_layer(gguf, f"{prefix}head_count", n_layer, at_most=_MAX_HEADS)
    if n_head is None:
        if architecture not in _NO_ATTENTION:
            _refuse_missing(gguf, f"{prefix}head_count")
        n_head = (0,) * n_layer
    n_head_kv = get_per_layer(gguf, f"{prefix}head_count_kv", n_layer, at_most=_MAX_HEADS)
    if n_head_kv is None:
        n_head_kv = n_head
    most_heads = max(n_head, default=0)
    default = n_embd // most_heads if most_heads else 0
    lengths = []
    for which in ("key_length", "value_length"):
        length = get_int(gguf, f"{prefix}{which}", at_most=_MAX_WIDTH)
        windowed = get_int(gguf, f"{prefix}{which}_swa", at_most=_MAX_WIDTH)
        lengths.append(max(default if length is None else length, windowed or 0))
    has_cache = _layers_with_cache(gguf, architecture, n_layer)
    kv_width = tuple(n * sum(lengths) * cached for n, cached in zip(n_head_kv, has_cache, strict=True))
    return _Heads(n_head, n_head_kv, lengths[0], lengths[1], kv_width)


def _layers_with_cache(gguf: GGUF, architecture: str, n_layer: int) -> list[bool]:
    """Tell for each layer whether it is an attention layer with a KV cache of its own."""
    if architecture in _NO_ATTENTION:
        return [False] * n_layer
    recurrent = get_per_layer(gguf, f"{architecture}.attention.recurrent_layers", n_layer, at_most=1)
    interval = get_int(gguf, f"{architecture}.full_attention_interval", at_least=1, at_most=_MAX_LAYERS)
    n_shared = get_int(gguf, f"{architecture}.attention.shared_kv_layers", at_most=n_layer) or 0
    n_ahead = get_int(gguf, f"{architecture}.nextn_predict_layers", at_most=n_layer) or 0
    interval = interval or _FULL_ATTENTION_INTERVAL.get(architecture, 1)
    cached = []
    for i in range(n_layer):
        # Layers that predict further tokens come last and always have attention.
        by_interval = (i + 1) % interval == 0 or i >= n_layer - n_ahead
        has_attention = by_interval if recurrent is None else not recurrent[i]
        # The last layers may read the cache of an earlier one (Gemma 3n and 4).
        cached.append(has_attention and i < n_layer - n_shared)
    return cached


def _has_recurrent_state(gguf: GGUF, architecture: str) -> bool:
    if architecture in _NO_ATTENTION or f"{architecture}.attention.recurrent_layers" in gguf.metadata:
        return True
    return any(f"{architecture}.{key}" in gguf.metadata for key in _STATE_KEYS)


def _n_vocab(gguf: GGUF, architecture: str) -> int:
    """Count tokens as llama.cpp does: by the tokenizer's list, else the metadata, else the embedding's rows."""
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    if tokens is not None:
        return len(tokens)
    n_vocab = get_int(gguf, f"{architecture}.vocab_size", at_most=_MAX_TOKENS)
    if n_vocab is not None:
        return n_vocab
    embedding = gguf.tensors.get("token_embd.weight")
    return embedding.shape[1] if embedding is not None and len(embedding.shape) > 1 else 0


def _quantization(gguf: GGUF) -> tuple[TypeShare, ...]:
    counts: dict[GGMLType, tuple[int, int]] = {}
    for tensor in gguf.tensors.values():
        n_tensors, n_bytes = counts.get(tensor.type, (0, 0))
        counts[tensor.type] = (n_tensors + 1, n_bytes + tensor.n_bytes)
    total = sum(n_bytes for _, n_bytes in counts.values())
    shares = [TypeShare(t, n_tensors, n_bytes, n_bytes / total) for t, (n_tensors, n_bytes) in counts.items()]
    return tuple(sorted(shares, key=lambda share: (-share.n_bytes, share.type)))


def _quantization_label(gguf: GGUF, quantization: tuple[TypeShare, ...]) -> str:
    file_type = get_int(gguf, "general.file_type", at_most=2**32 - 1)
    if file_type is not None and file_type & ~FILE_TYPE_GUESSED in FILE_TYPE_NAMES:
        return FILE_TYPE_NAMES[file_type & ~FILE_TYPE_GUESSED]
    return quantization[0].type.name if quantization else "none"


def _required_text(gguf: GGUF, key: str) -> str:
    value = get_text(gguf, key)
    return value if value is not None else _refuse_missing(gguf, key)


def _required_int(gguf: GGUF, key: str, *, at_most: int) -> int:
    value = get_int(gguf, key, at_most=at_most)
    return value if value is not None else _refuse_missing(gguf, key)


def _refuse_missing(gguf: GGUF, key: str) -> NoReturn:
    """Refuse a file without a key that every text model has; by its kind, if it is no text model."""
    require_text_decoder(gguf)
    refuse_missing(gguf, key)
