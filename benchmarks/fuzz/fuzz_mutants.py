"""What fuzz_gguf.py does to a model: to the bytes of its header, to its values, and to its tensors as a whole."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
from fuzz_bases import Source
from support.models.gguf_writer import Built, RawTensor, Typed, build_gguf, typed

from edgedec.gguf.file import ValueType
from edgedec.gguf.tensor_types import GGMLType

VALUES: list[Any] = [
    *(0, 1, 2, -1, 3, 4, 7, 512, 1025, 2**31, 2**32 - 1, 2**63, Typed(ValueType.INT64, -(2**63))),
    *(0.0, -1.0, 0.5, float("nan"), float("inf"), Typed(ValueType.FLOAT64, 1e308)),
    *("", "llama", "bert", "model", "none", "x" * 1000, b"\xff\x00", True, False),
    *([], [1, 2], [2**31, 1], [0, 0], ["a"], [0.5, 0.5], [True, False], [[1], [2]], np.array([-1, -2])),
]

_PATTERNS = (b"\xff", b"\x00\x7c", b"\xff\x7f", b"\x00\x00\xc0\x7f", b"\x80", b"\x7f", b"\xff\xff\x7f\x7f", b"\x00")


def other_data(source: Source, rng: random.Random) -> bytes:
    """Return a file whose header is sound and some of whose tensors hold other bytes."""
    tensors: dict[str, Any] = dict(source.tensors)
    for name in rng.sample(sorted(tensors), min(rng.choice([1, 1, 2, 5]), len(tensors))):
        old = tensors[name]
        is_raw = isinstance(old, RawTensor)
        data = bytearray(old.data if is_raw else old.tobytes())
        if rng.random() < 0.4:
            data[:] = rng.randbytes(len(data))
        elif rng.random() < 0.5:
            data[:] = (rng.choice(_PATTERNS) * len(data))[: len(data)]
        else:
            for _ in range(rng.randint(1, 20)):
                data[rng.randrange(len(data))] = rng.choice([0x7F, 0xFF, 0x7C, 0xFC, 0x00, 0x80])
        whole = bytes(data)
        floats = None if is_raw else np.frombuffer(whole, old.dtype).reshape(old.shape)
        tensors[name] = RawTensor(old.type, old.shape, whole) if is_raw else floats
    return build_gguf(source.metadata, tensors).data


def other_values(source: Source, rng: random.Random) -> Source:
    """Return a model in which one to three values are others, or gone."""
    metadata = dict(source.metadata)
    for key in rng.sample(sorted(metadata), min(len(metadata), rng.randint(1, 3))):
        if rng.random() < 0.2:
            del metadata[key]
        else:
            metadata[key] = rng.choice(VALUES)
    return Source(metadata, source.tensors)


def edit_number(data: bytearray, base: Built, rng: random.Random) -> None:
    """Set a count, length, type, dimension or offset to an extreme or a nearby value."""
    field = rng.choice(base.fields)
    top = 2 ** (8 * field.n_bytes)
    old = int.from_bytes(data[field.start : field.start + field.n_bytes], "little")
    choices = [0, 1, top - 1, top // 2, top // 2 - 1, 2**31, 2**32, len(data), old - 1, old + 1, old * 2, old << 8]
    value = rng.choice([*choices, rng.randrange(top), rng.randrange(64)]) % top
    data[field.start : field.start + field.n_bytes] = value.to_bytes(field.n_bytes, "little")


def flip_bits(data: bytearray, base: Built, rng: random.Random) -> None:
    """Flip one to eight bits of the header."""
    for _ in range(rng.randint(1, 8)):
        data[_place(data, base, rng)] ^= 1 << rng.randrange(8)


def set_byte(data: bytearray, base: Built, rng: random.Random) -> None:
    """Set a byte of the header to a value that matters more often than others."""
    data[_place(data, base, rng)] = rng.choice([0, 1, 9, 0x7F, 0x80, 0xC3, 0xFF])


def truncate(data: bytearray, base: Built, rng: random.Random) -> None:
    """Cut the file, within the header or after it."""
    del data[_place(data, base, rng) if rng.random() < 0.8 else rng.randrange(len(data) + 1) :]


def splice(data: bytearray, base: Built, rng: random.Random) -> None:
    """Take out a region, or put random bytes in."""
    start = _place(data, base, rng)
    end = min(len(data), start + rng.randint(0, 24))
    data[start:end] = rng.randbytes(rng.randint(0, 24))


def duplicate(data: bytearray, base: Built, rng: random.Random) -> None:
    """Copy a region of the header to another place, over what is there or in between."""
    start, target = _place(data, base, rng), _place(data, base, rng)
    region = data[start : start + rng.choice([4, 8, 16, 64, 256])]
    data[target : target + rng.choice([0, len(region)])] = region


def exchange_types(data: bytearray, base: Built, rng: random.Random) -> None:
    """Give one value or tensor the type of another."""
    types = [field for field in base.fields if field.kind == "type"]
    one, other = rng.choice(types), rng.choice(types)
    data[one.start : one.start + 4] = data[other.start : other.start + 4]


BYTE_MUTATIONS: list[Callable[[bytearray, Built, random.Random], None]] = [
    edit_number,
    edit_number,
    flip_bits,
    set_byte,
    truncate,
    splice,
    duplicate,
    exchange_types,
]


def damaged(source: Source, sound: Built, rng: random.Random) -> bytes:
    """Return a file with other values in a sound header, or with one to three mutations of its bytes."""
    if rng.random() < 0.3:
        return build_gguf(other_values(source, rng).metadata, source.tensors).data
    data = bytearray(sound.data)
    for _ in range(rng.choice([1, 1, 2, 3])):
        if data:
            rng.choice(BYTE_MUTATIONS)(data, sound, rng)
    return bytes(data)


def _place(data: bytearray, base: Built, rng: random.Random) -> int:
    """Return a position within the header, however short the file has become."""
    last = base.fields[-1]
    return rng.randrange(min(len(data), last.start + last.n_bytes) or 1)


# Below: mutants whose header is sound, and which contradict themselves or what llama.cpp expects.

WHOLE = [0, 1, 2, 3, 5, 6, 7, 8, 16, 31, 33, 64, 65, 128, 255, 257, 512, 513, 1024, 2**16, 2**20, 2**31 - 1, 2**32 - 1]
REAL = [0.0, -0.0, -1.0, 1e-30, 1e30, 3e38, -3e38, 1e-45, 0.5, float("nan"), float("inf"), float("-inf")]
TEXTS = ["", "linear", "none", "yarn", "longrope", "mrope", "x" * 5000, b"\xff\xfe", "\n", "{{ x }}" * 2000, "gpt2"]
TOKENS = [
    "",
    "a",
    " ",
    "\n",
    "<0x0A>",
    "<0x",
    "<0xZZ>",
    "\u2581",
    b"\xff",
    b"\xe2\x96",
    "x" * 3000,
    "<|im_end|>",
    "\\x",
]
FLAGS: list[Any] = [True, False]
KINDS = [0, 1, 2, 3, 4, 5, 6, 7, -1, 2**31 - 1]
TOKENIZERS = ["llama", "gpt2", "t5", "rwkv", "plamo2", "bert", "gemma4", "whitespace", "hybriddna", "test", "none", "x"]
PRE = [
    "default",
    "llama-bpe",
    "qwen2",
    "gpt-2",
    "smollm",
    "tekken",
    "deepseek-llm",
    "kimi-k2",
    "gemma4",
    "falcon",
    "zz",
]
ARCHITECTURES = [
    *("llama", "llama4", "qwen2", "qwen2moe", "qwen2vl", "qwen3", "qwen3moe", "gemma", "gemma2", "gemma3", "gemma3n"),
    *("phi2", "phi3", "falcon", "gptneox", "gpt2", "mpt", "starcoder2", "stablelm", "olmo", "olmo2", "granite"),
    *("granitemoe", "cohere2", "deepseek2", "mamba", "mamba2", "rwkv7", "lfm2", "jamba", "exaone", "smollm3", "dbrx"),
    *("minicpm", "internlm2", "command-r", "bloom", "baichuan", "deci", "arcee", "seed_oss", "gpt-oss", "glm4", "x"),
]
KEYS: dict[str, list[Any]] = {
    **dict.fromkeys(
        [
            *("attention.key_length", "attention.value_length", "attention.key_length_swa", "rope.dimension_count"),
            *("attention.value_length_swa", "rope.dimension_count_swa", "attention.sliding_window", "vocab_size"),
            *("attention.sliding_window_pattern", "expert_count", "expert_used_count", "expert_group_count"),
            *(
                "expert_group_used_count",
                "expert_shared_count",
                "expert_feed_forward_length",
                "leading_dense_block_count",
            ),
            *("expert_shared_feed_forward_length", "nextn_predict_layers", "embedding_length_out", "pooling_type"),
            *(
                "attention.head_count_kv",
                "attention.head_count",
                "feed_forward_length",
                "context_length",
                "block_count",
            ),
            *("embedding_length", "attention.shared_kv_layers", "rope.scaling.original_context_length"),
            *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "ssm.group_count"),
            *("expert_gating_func", "token_shift_count", "interleave_moe_layer_step", "attention.group_norm_groups"),
        ],
        WHOLE,
    ),
    **dict.fromkeys(
        [
            *("attention.layer_norm_rms_epsilon", "rope.freq_base", "rope.freq_base_swa", "rope.scaling.factor"),
            *("rope.scaling.attn_factor", "attention.scale", "logit_scale", "final_logit_softcapping"),
            *("attn_logit_softcapping", "attention.max_alibi_bias", "attention.clamp_kqv", "expert_weights_scale"),
            *("rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
            *("residual_scale", "embedding_scale", "attention.layer_norm_epsilon", "rope.scale_linear"),
        ],
        REAL,
    ),
    **dict.fromkeys(["rope.scaling.type", "tensor_data_layout"], TEXTS),
    **dict.fromkeys(["rope.scaling.finetuned", "attention.causal", "use_parallel_residual"], FLAGS),
}
TOKENIZER_KEYS: dict[str, list[Any]] = {
    **dict.fromkeys(
        [f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown", "separator", "seperator")], WHOLE
    ),
    **dict.fromkeys([f"{name}_token_id" for name in ("padding", "mask", "cls", "fim_pre", "fim_pad", "prefix")], WHOLE),
    **dict.fromkeys([f"add_{name}" for name in ("bos_token", "eos_token", "sep_token", "space_prefix")], FLAGS),
    "remove_extra_whitespaces": FLAGS,
    "model": TOKENIZERS,
    "pre": PRE,
    "token_type_count": WHOLE,
}


def set_known_key(source: Source, rng: random.Random) -> Source:
    """Set a key that llama.cpp reads to a value it may not expect, of the right type more often than not."""
    name = source.metadata.get("general.architecture")
    if rng.random() < 0.65:
        key, values = rng.choice(sorted(KEYS.items()))
        key = f"{name}.{key}"
    else:
        key, values = rng.choice(sorted(TOKENIZER_KEYS.items()))
        key = f"tokenizer.ggml.{key}"
    old = source.metadata.get(key)
    value = rng.choice(values if rng.random() < 0.9 else VALUES)
    if isinstance(old, int) and not isinstance(old, bool) and rng.random() < 0.5:
        value = max(0, rng.choice([old - 1, old + 1, old * 2, old // 2]))
    if type(value) is int and 0 <= value < 2**32 and rng.random() < 0.15:
        n_layer = source.metadata.get(f"{name}.block_count")
        n = n_layer if isinstance(n_layer, int) and 0 < n_layer < 9 else 2
        numbers = [rng.choice([value, 0, 2, 4]) for _ in range(n + rng.choice([0, 0, 0, 1, -1]))]
        value = Typed(ValueType.ARRAY, numbers, ValueType.UINT32)
    return Source(source.metadata | {key: value}, source.tensors)


def drop_key(source: Source, rng: random.Random) -> Source:
    """Take one value out."""
    gone = rng.choice(sorted(source.metadata))
    return Source({key: value for key, value in source.metadata.items() if key != gone}, source.tensors)


def change_array(source: Source, rng: random.Random) -> Source:
    """Shorten, empty, lengthen or change an array, above all one of the vocabulary."""
    arrays = {key: typed(value) for key, value in source.metadata.items() if typed(value).type is ValueType.ARRAY}
    if not arrays:
        return source
    key = rng.choice(sorted(arrays))
    old = arrays[key]
    values = list(old.value)
    action = rng.randrange(6)
    if action == 0:
        del values[rng.choice([0, len(values) // 2, max(len(values) - 1, 0)]) :]
    elif action == 1:
        values += values[: rng.choice([1, 5, len(values)])]
    elif values:
        for _ in range(rng.choice([1, 1, 3, 100])):
            values[rng.randrange(len(values))] = _element(old.element_type, values, rng)
    element_type = rng.choice(list(ValueType)[:8]) if rng.random() < 0.05 else old.element_type
    if element_type is not old.element_type:
        values = [0] * len(values)
    return Source(source.metadata | {key: Typed(ValueType.ARRAY, values, element_type)}, source.tensors)


def _element(element_type: ValueType | None, values: list[Any], rng: random.Random) -> Any:
    if element_type is ValueType.STRING:
        return rng.choice([*TOKENS, rng.choice(values)])
    if element_type is ValueType.FLOAT32:
        return rng.choice(REAL)
    if element_type is ValueType.BOOL:
        return rng.random() < 0.5
    return rng.choice(KINDS) if element_type is ValueType.INT32 else rng.choice([0, 1, 127, 5])


def change_shape(source: Source, rng: random.Random) -> Source:
    """Swap, flatten or stretch the dimensions of tensors, with as much data as they then need."""
    tensors = dict(source.tensors)
    for name in _some(tensors, rng):
        old = tensors[name]
        shape = list(old.shape)
        action = rng.randrange(5)
        if action == 0:
            shape.reverse()
        elif action == 1:
            shape = [int(np.prod(shape))]
        elif action == 2:
            shape.append(rng.choice([1, 2]))
        else:
            i = rng.randrange(len(shape))
            shape[i] = max(1, rng.choice([shape[i] - 1, shape[i] + 1, shape[i] * 2, shape[i] // 2, 1]))
        tensors[name] = _fitted(old.type, tuple(shape[:4]), old.data)
    return Source(source.metadata, tensors)


def change_type(source: Source, rng: random.Random) -> Source:
    """Give tensors another type, with as much data as it needs."""
    tensors = dict(source.tensors)
    for name in _some(tensors, rng):
        new = rng.choice(list(GGMLType))
        if tensors[name].shape[0] % new.block_size == 0:
            tensors[name] = _fitted(new, tensors[name].shape, tensors[name].data)
    return Source(source.metadata, tensors)


def move_tensor(source: Source, rng: random.Random) -> Source:
    """Rename, remove, copy or exchange tensors."""
    tensors = dict(source.tensors)
    one, other = rng.choice(sorted(tensors)), rng.choice(sorted(tensors))
    action = rng.randrange(5)
    if action == 0:
        tensors[one], tensors[other] = tensors[other], tensors[one]
    elif action == 1:
        del tensors[one]
    elif action == 2:
        tensors[_other_name(one, rng)] = tensors[one]
    elif action == 3:
        tensors[_other_name(one, rng)] = tensors.pop(one)
    else:
        for name in [name for name in tensors if name.startswith(f"blk.{rng.randrange(2)}.")]:
            del tensors[name]
    return Source(source.metadata, tensors)


def rename_architecture(source: Source, rng: random.Random) -> Source:
    """Say that the model is of another architecture, with its keys or without them."""
    old, new = str(source.metadata.get("general.architecture")), rng.choice(ARCHITECTURES)
    metadata = {key.replace(f"{old}.", f"{new}.", 1): value for key, value in source.metadata.items()}
    return Source(metadata | {"general.architecture": new}, source.tensors)


def _some(tensors: dict[str, Any], rng: random.Random) -> list[str]:
    """Return one tensor, all of one role, or all that share a shape."""
    name = rng.choice(sorted(tensors))
    if rng.random() < 0.5:
        return [name]
    role = name.split(".")[-2:]
    return [other for other in tensors if other.split(".")[-2:] == role]


def _other_name(name: str, rng: random.Random) -> str:
    parts = name.split(".")
    if len(parts) == 1 or rng.random() < 0.5:
        parts[-1] = "bias" if parts[-1] == "weight" else "weight"
    else:
        more = ["attn_qkv", "attn_q_norm", "attn_k_norm", "attn_norm_2", "rope_freqs", "ffn_gate_inp", "post_ffw_norm"]
        parts[-2] = rng.choice([*more, "attn_output", "ffn_up", "ffn_down_exps", "output", "attn_q_a", "ssm_in", "x"])
    return ".".join(parts)


def _fitted(number: int, shape: tuple[int, ...], data: bytes) -> RawTensor:
    """Return a tensor of the type and shape, its data repeated or cut to fit."""
    block = GGMLType(number)
    n_bytes = -(-int(np.prod(shape)) // block.block_size) * block.block_bytes
    return RawTensor(number, shape, (data * (n_bytes // len(data) + 1))[:n_bytes])


CONTRADICTIONS: list[Callable[[Source, random.Random], Source]] = [
    *(set_known_key, set_known_key, set_known_key, set_known_key, change_array, change_array),
    *(change_shape, change_type, move_tensor, drop_key, other_values, rename_architecture),
]


def contradictory(source: Source, rng: random.Random) -> bytes:
    """Return a file with a sound header that contradicts itself in one to three places."""
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        source = rng.choice(CONTRADICTIONS)(source, rng) if source.tensors else source
    return build_gguf(source.metadata, source.tensors).data
