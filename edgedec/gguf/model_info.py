"""What a GGUF says about its model: size, shape, quantization, context, recommended sampling."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from edgedec.errors import EdgedecError, ModelFormatError
from edgedec.gguf.file import GGUF, VOCABULARY, ValueType, read_header_of
from edgedec.gguf.metadata import WHOLE, get_array, get_float, get_int, get_per_layer, get_text, refuse_missing
from edgedec.gguf.model_kinds import require_text_decoder
from edgedec.gguf.tensor_types import FILE_TYPE_GUESSED, FILE_TYPE_NAMES, GGMLType
from edgedec.sampling import LARGEST_BIAS

# llama.cpp stops at 512 layers; the other bounds are far above any model and keep sums exact.
_MAX_LAYERS = 1024
_MAX_HEADS = 2**16
_MAX_WIDTH = 2**24
_MAX_TOKENS = 2**31 - 1

_NO_ATTENTION = frozenset({"mamba", "mamba2", "rwkv6", "rwkv6qwen2", "rwkv7", "arwkv7"})
_STATE_KEYS = ("ssm.state_size", "wkv.head_size", "shortconv.l_cache", "kda.head_dim", "attention.recurrent_layers")


@dataclass(frozen=True, slots=True)
class TypeShare:
    """The tensors of one type: how many, how large, and their share of all tensor bytes (0 to 1)."""

    type: GGMLType
    n_tensors: int
    n_bytes: int
    share: float


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What the metadata and the tensors of a model say about it.

    An attribute is None where the file does not give its value, unless a default is named here. This is the one
    reading of a model's hyperparameters: checks and runtimes take them from here.

    Attributes:
        name: What a person calls the model, as model_name returns it.
        n_params: Number of weights in all tensors.
        n_bytes: Size of the file, or of all parts of a split one.
        quantization: The types of its tensors, the largest share first.
        quantization_label: What the quantizer was asked for ("Q4_K_M"), else the type with the largest share.
        n_ctx_train: Longest context the model was trained for, in tokens; of a model with an encoder, which reads as
            many as the decoder writes, that of both together.
        n_ctx_scaled: The same where the metadata scales positions (rope.scaling): the longest that is meant to work.
        n_vocab: Number of tokens: of the tokenizer's list, else of `vocab_size`, else the embedding's rows.
        n_head: Query heads by layer; 0 in layers without attention.
        n_head_kv: Key and value heads by layer; 0 in layers without attention. The default is n_head.
        key_length: Length of a key head in layers that see the whole context. The default is n_embd / n_head.
        value_length: Length of a value head in those layers, with the same default.
        n_ff: Width of the feed-forward block by layer.
        n_rot: Elements of a key that are rotated to their position. The default is key_length.
        rope_base: Base of the rotation's frequencies. The default is 10,000.
        rope_scaling: How positions are scaled ("linear", "yarn", ...).
        rope_factor: By what factor.
        rms_epsilon: What RMS norms add to the mean square.
        sliding_window: Tokens that windowed layers see; 0 where no layer has a window.
        has_recurrent_state: Some layers keep a state of fixed size, which cannot be rolled back by dropping tokens.
        n_expert: Experts per layer; 0 for a dense model.
        sampling_defaults: Recommended sampling, by the names of SamplingParams.
    """

    architecture: str
    name: str
    n_params: int
    n_bytes: int
    quantization: tuple[TypeShare, ...]
    quantization_label: str
    n_ctx_train: int | None
    n_ctx_scaled: int | None
    n_vocab: int
    n_layer: int
    n_embd: int
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    key_length: int
    value_length: int
    n_ff: tuple[int, ...] | None
    n_rot: int
    rope_base: float
    rope_scaling: str | None
    rope_factor: float | None
    rms_epsilon: float | None
    sliding_window: int
    has_recurrent_state: bool
    n_expert: int
    n_expert_used: int
    has_chat_template: bool
    license: str | None
    sampling_defaults: dict[str, Any]


def model_name(gguf: GGUF) -> str:
    """Return what a person calls a model: the name of its file or folder, without the number of a part.

    What the file says of its own name (general.name) stands for that only where the file is called by its checksum, as
    ollama's are.
    """
    path, general_name = gguf.paths[0], get_text(gguf, "general.name")
    name = path.parent.name if path.name == VOCABULARY else re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
    return general_name if general_name and name.startswith("sha256-") else name


def describe(gguf: GGUF) -> ModelInfo:
    """Return what a model's metadata and tensors say about it.

    Raises:
        UnsupportedModelError: The file holds no text decoder and lacks what every model says.
        ModelFormatError: Something every text model says is missing, or a value has the wrong type or range.
    """
    architecture = get_text(gguf, "general.architecture")
    if architecture is None:
        _refuse_missing(gguf, "general.architecture")

    def whole(key: str, at_most: int) -> int | None:
        return get_int(gguf, f"{architecture}.{key}", at_most=at_most)

    def required(key: str, at_most: int) -> int:
        value = whole(key, at_most)
        return value if value is not None else _refuse_missing(gguf, f"{architecture}.{key}")

    n_layer, n_embd = required("block_count", _MAX_LAYERS), required("embedding_length", _MAX_WIDTH)
    n_head, n_head_kv = _heads(gguf, architecture, n_layer)
    head_length = n_embd // next(filter(None, n_head), n_embd + 1)
    key_length = _either(whole("attention.key_length", _MAX_WIDTH), head_length)
    quantization = _quantization(gguf)
    base = get_float(gguf, f"{architecture}.rope.freq_base")
    n_ctx_train = whole("context_length", _MAX_TOKENS)
    if n_ctx_train is not None and whole("decoder_start_token_id", _MAX_TOKENS) is not None:
        n_ctx_train *= 2
    scaling = f"{architecture}.rope.scaling"
    kind, factor = get_text(gguf, f"{scaling}.type"), get_float(gguf, f"{scaling}.factor")
    n_original = whole("rope.scaling.original_context_length", _MAX_TOKENS) or n_ctx_train
    return ModelInfo(
        architecture=architecture,
        name=model_name(gguf),
        n_params=sum(tensor.n_elements for tensor in gguf.tensors.values()),
        n_bytes=gguf.n_bytes,
        quantization=quantization,
        quantization_label=_quantization_label(gguf, quantization),
        n_ctx_train=n_ctx_train,
        n_ctx_scaled=_scaled_context(n_ctx_train, n_original, None if kind == "none" else kind, factor),
        n_vocab=_n_vocab(gguf, architecture),
        n_layer=n_layer,
        n_embd=n_embd,
        n_head=n_head,
        n_head_kv=n_head_kv,
        key_length=key_length,
        value_length=_either(whole("attention.value_length", _MAX_WIDTH), head_length),
        n_ff=get_per_layer(gguf, f"{architecture}.feed_forward_length", n_layer, at_most=_MAX_WIDTH),
        n_rot=_either(whole("rope.dimension_count", _MAX_TOKENS), key_length),
        rope_base=10000.0 if base is None else base,
        rope_scaling=kind,
        rope_factor=factor,
        rms_epsilon=get_float(gguf, f"{architecture}.attention.layer_norm_rms_epsilon"),
        sliding_window=whole("attention.sliding_window", _MAX_TOKENS) or 0,
        has_recurrent_state=architecture in _NO_ATTENTION
        or any(f"{architecture}.{key}" in gguf.metadata for key in _STATE_KEYS),
        n_expert=whole("expert_count", _MAX_WIDTH) or 0,
        n_expert_used=whole("expert_used_count", _MAX_WIDTH) or 0,
        has_chat_template=bool(get_text(gguf, "tokenizer.chat_template")),
        license=get_text(gguf, "general.license"),
        sampling_defaults=read_sampling_defaults(gguf),
    )


def read_model_info(path: Path) -> ModelInfo | None:
    """Return what the header of a model's file or of an exported folder says; None where no header can be read."""
    try:
        return describe(read_header_of(path))
    except EdgedecError:  # the runtime says what is wrong, or needs no such header
        return None


def trained_context(path: Path) -> int:
    """Return the longest context that a model was trained for, in tokens; 0 where its header does not say it."""
    info = read_model_info(path)
    return (info.n_ctx_train or 0) if info is not None else 0


def context_note(path: Path, n_ctx: int, what: str = "the model") -> str:
    """Return a note if a context is longer than what a model was trained for, else "".

    Args:
        path: The model's file, or the folder of an export.
        n_ctx: The context, in tokens. Where the metadata scales positions, it is compared with the scaled length.
        what: What the note calls the model.
    """
    info = read_model_info(path)
    n_trained = 0 if info is None else info.n_ctx_scaled or 0
    if not 0 < n_trained < n_ctx:
        return ""
    return (
        f"the context of {n_ctx} tokens is longer than the {n_trained} that {what} was trained for: "
        "text beyond them tends to be poor"
    )


def _either(value: int | None, default: int) -> int:
    return default if value is None else value


def _scaled_context(n_ctx: int | None, n_original: int | None, kind: str | None, factor: float | None) -> int | None:
    """Return the context that positions are scaled to; files differ in whether n_ctx is that already."""
    if n_ctx is None or n_original is None or kind is None or factor is None or not 1 < factor < _MAX_TOKENS:
        return n_ctx
    return max(n_ctx, min(int(factor * n_original), _MAX_TOKENS))


def _heads(gguf: GGUF, architecture: str, n_layer: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the numbers of query heads, and of key and value heads, by layer."""
    key = f"{architecture}.attention.head_count"
    n_head = get_per_layer(gguf, key, n_layer, at_most=_MAX_HEADS)
    if n_head is None:
        n_head = (0,) * n_layer if architecture in _NO_ATTENTION else _refuse_missing(gguf, key)
    n_head_kv = get_per_layer(gguf, f"{key}_kv", n_layer, at_most=_MAX_HEADS)
    return n_head, n_head if n_head_kv is None else n_head_kv


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


def _refuse_missing(gguf: GGUF, key: str) -> NoReturn:
    """Refuse a file without a key that every text model has; by its kind, if it is no text model."""
    require_text_decoder(gguf)
    refuse_missing(gguf, key)


_ABOVE_ZERO = math.ulp(0.0)


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of SamplingParams, and how a GGUF gives it.

    Attributes:
        name: Its name in SamplingParams.
        low, high: Its range there.
        clip_low, clip_high: Whether llama.cpp takes a value below `low`, or above `high`, for "off".
        whole: Whether it is a whole number.
    """

    name: str
    low: float
    high: float
    clip_low: bool = False
    clip_high: bool = False
    whole: bool = False


_OPTIONS = {
    "general.sampling.temp": _Option("temperature", 0, math.inf, clip_low=True),
    "general.sampling.top_k": _Option("top_k", 0, math.inf, clip_low=True, whole=True),
    "general.sampling.top_p": _Option("top_p", _ABOVE_ZERO, 1, clip_high=True),
    "general.sampling.min_p": _Option("min_p", 0, 1, clip_low=True),
    "general.sampling.penalty_repeat": _Option("repetition_penalty", _ABOVE_ZERO, math.inf),
    "general.sampling.penalty_last_n": _Option("penalty_last_n", -1, math.inf, whole=True),
    # Ollama writes these two keys; llama.cpp has none for them.
    "general.sampling.penalty_freq": _Option("frequency_penalty", -100, 100),
    "general.sampling.penalty_present": _Option("presence_penalty", -100, 100),
}


def read_sampling_defaults(gguf: GGUF) -> dict[str, Any]:
    """Return the options that the file recommends, by their names in SamplingParams and within their ranges there.

    The tokens that a file suppresses (Gemma 4 12B) are a `logit_bias` of -LARGEST_BIAS each.

    Raises:
        ModelFormatError: A value is no finite number, or is out of its option's range.
    """
    defaults: dict[str, Any] = {}
    for key, option in _OPTIONS.items():
        value = get_int(gguf, key, at_least=-(2**31), at_most=2**31 - 1) if option.whole else get_float(gguf, key)
        if value is None:
            continue
        if (option.clip_low and value < option.low) or (option.clip_high and value > option.high):
            value = type(value)(option.low if option.clip_low else option.high)
        if not option.low <= value <= option.high:
            raise ModelFormatError(
                f"{gguf.paths[0]}: metadata {key!r} is {value}, which is no {option.name}; "
                "download another GGUF of the model"
            )
        defaults[option.name] = value
    suppressed = get_array(gguf, "tokenizer.ggml.suppress_tokens", WHOLE)
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    if suppressed is not None and tokens is not None:
        ids = suppressed.numpy()
        if len(ids) and not 0 <= ids.min() <= ids.max() < len(tokens):
            raise ModelFormatError(
                f"{gguf.paths[0]}: 'tokenizer.ggml.suppress_tokens' names a token outside the vocabulary of "
                f"{len(tokens)}; download another GGUF of the model"
            )
        defaults["logit_bias"] = dict.fromkeys(map(int, ids), -LARGEST_BIAS)
    return defaults
