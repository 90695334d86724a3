"""Refusing a GGUF whose header is well formed, but whose numbers contradict each other or the tensors.

llama.cpp itself refuses most wrong shapes. But it ends the process over a number that it only asserts, divides by or
indexes with: the checks here find those before llama.cpp sees them. They hold for every architecture; only the
architectures of `_LAYERS` (all their tensors are known) and `_WHOLE_HEADS` (heads are rotated whole) have further ones.
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import NoReturn

import numpy as np

from edgedec.errors import ModelFormatError
from edgedec.gguf.file import GGUF, GGUFArray, ValueType
from edgedec.gguf.metadata import WHOLE, get_array, get_bool, get_float, get_int, get_per_layer, get_text
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.shared.encoders import encoder_fault

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # llama.cpp's
_MAX_WIDTH = 2**24  # far above any model; llama.cpp allocates by windows and lengths
_MAX_COUNT = 2**31 - 1
# llama.cpp recurses once for each byte of a token; what it builds for PLaMo 2 costs the cube of a token's length.
_MAX_TOKEN_BYTES, _MAX_SUFFIX_COST = 4096, 2**30
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

# Architectures whose keys and values have one length, all of which is rotated.
_WHOLE_HEADS = frozenset(
    {
        *("apertus", "arcee", "arctic", "baichuan", "chameleon", "codeshell", "dbrx", "deepseek", "dots1"),
        *("ernie4_5", "ernie4_5-moe", "exaone", "falcon", "granite", "granitemoe", "grok", "grovemoe"),
        *("hunyuan-dense", "hunyuan-moe", "hunyuan_vl", "internlm2", "jais2", "llama", "maincoder", "minicpm"),
        *("mistral3", "olmo", "olmo2", "olmoe", "orion", "paddleocr", "pangu-embedded", "plamo", "qwen2", "qwen2moe"),
        *("qwen2vl", "qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe", "seed_oss", "smallthinker", "smollm3"),
        *("starcoder2", "talkie", "xverse"),
    }
)
_STATE_SPACES = frozenset({"falcon-h1", "granitehybrid", "mamba2", "nemotron_h", "nemotron_h_moe"})
_TWICE_AS_WIDE = frozenset({"granitehybrid", "mamba2"})  # llama.cpp ends the process where the mixers are not
_SECTIONED = frozenset({"qwen2vl", "qwen3vl", "qwen3vlmoe"})  # whose rotations are divided into sections
_MOST_GATING = 4  # llama.cpp's last number of a way to weigh experts
_NO_ROTATION = frozenset({"glm5-next"})
_QKV = {"attn_q": "eq", "attn_k": "ek", "attn_v": "ev", "attn_output": "qe", "attn_norm": "e", "ffn_norm": "e"}
_DENSE = {"ffn_gate": "ef", "ffn_up": "ef", "ffn_down": "fe"}
_EXPERTS = {"ffn_gate_inp": "ex", "ffn_gate_exps": "ewx", "ffn_up_exps": "ewx", "ffn_down_exps": "wex"}
# What layers of these have where they have experts: not the first ones, and not those without a feed-forward width.
_MIXTURES = {
    **dict.fromkeys(("granitehybrid", "lfm2moe", "qwen35moe", "qwen3next"), _EXPERTS),
    "nemotron_h_moe": {role: letters for role, letters in _EXPERTS.items() if role != "ffn_gate_exps"},
}
# llama.cpp ends the process where a file of lfm2moe has no experts.
_ONLY_EXPERTS = _MIXTURES.keys() - {"granitehybrid"}
_SHARED_EXPERT = {"ffn_gate_shexp": "es", "ffn_up_shexp": "es", "ffn_down_shexp": "se"}
_HEAD_NORMS = {"attn_q_norm": "h", "attn_k_norm": "h"}
_POST_NORMS = {"post_attention_norm": "e", "post_ffw_norm": "e"}
# The weights of a layer by architecture, with a letter for each dimension of their shape: `_sizes` says what it is.
_LAYERS = {
    "llama": _QKV | _DENSE,
    "qwen2": _QKV | _DENSE,
    "qwen3": _QKV | _DENSE | _HEAD_NORMS,
    "gemma": _QKV | _DENSE,
    "gemma2": _QKV | _DENSE | _POST_NORMS,
    "gemma3": _QKV | _DENSE | _HEAD_NORMS | _POST_NORMS,
    "phi3": _QKV | {"ffn_up": "eg", "ffn_down": "fe"},
    "granitemoe": _QKV | _EXPERTS,
    "gpt-oss": {name: shape for name, shape in _QKV.items() if name != "ffn_norm"} | _EXPERTS,
    "olmoe": _QKV | _EXPERTS | {"attn_q_norm": "q", "attn_k_norm": "k"},
    "qwen2moe": _QKV | _EXPERTS | _SHARED_EXPERT | {"ffn_gate_inp_shexp": "e"},
    **dict.fromkeys(("qwen3moe", "qwen3vlmoe"), _QKV | _EXPERTS | _HEAD_NORMS),
    "smallthinker": _QKV | _EXPERTS,
}
_TOP = {"token_embd.weight": "en", "output_norm.weight": "e", "output.weight": "en"}

# llama.cpp computes with weights of none of these types; whole numbers of 32 and 64 bits may only be tables of ids.
_NO_WEIGHT = frozenset({GGMLType.I8, GGMLType.I16, GGMLType.F64, GGMLType.Q8_1, GGMLType.Q8_K})
_IDS = frozenset({GGMLType.I32, GGMLType.I64})
_COMPUTED = ("token_embd", "output", "attn_", "ffn_", "ssm_", "time_mix_", "channel_mix_")
_ONLY_F32 = frozenset(
    {"rope_freqs", "rope_factors_long", "rope_factors_short", "ssm_a", "ssm_d", "ssm_conv1d", "conv", "token_types"}
)

_BPE = frozenset({"gpt2", "gemma4", "hybriddna", "whitespace"})
# Token ids that llama.cpp takes where the metadata names none, by tokenizer.
_DEFAULT_BOS = {"llama": 1, "bert": 101, "gpt2": 11, "hybriddna": 11, "whitespace": 11}
_DEFAULT_EOS = {"llama": 2, "t5": 1, "gpt2": 11, "hybriddna": 11, "whitespace": 11}
# Pre-tokenizers of byte-pair vocabularies that begin texts with BOS where the metadata does not say.
_ADDS_BOS = frozenset(
    {
        *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
        *("tekken", "chameleon", "gemma4"),
    }
)
_BYTE_KIND = 6
_TEXT_BYTES = (*range(0xC0), *range(0xC2, 0xF5))  # the bytes that occur in UTF-8


def require_consistent(gguf: GGUF) -> None:
    """Raise an error if two statements of a text model's header contradict each other.

    Raises:
        ModelFormatError: They do; the message names both.
        UnsupportedModelError: The file holds no text decoder.
    """
    info = describe(gguf)
    _check_layers(gguf, info)
    _check_heads(gguf, info)
    if (fault := encoder_fault(gguf, info)) is not None:
        _refuse(gguf, *fault)
    _check_experts(gguf, info)
    _check_numbers(gguf, info.architecture)
    _check_types(gguf)
    _check_shapes(gguf, info)
    _check_vocabulary(gguf, info.n_vocab)


def _refuse(gguf: GGUF, found: str, expected: str) -> NoReturn:
    raise ModelFormatError(
        f"{gguf.paths[0]}: {found}, expected {expected}; the file is damaged or was converted wrongly: "
        "download another GGUF of the model"
    )


def _check_layers(gguf: GGUF, info: ModelInfo) -> None:
    name = info.architecture
    if not 1 <= info.n_layer <= _MAX_LAYERS:
        _refuse(gguf, f"{name}.block_count is {info.n_layer}", f"1 to {_MAX_LAYERS}")
    if info.n_embd < 1:
        _refuse(gguf, f"{name}.embedding_length is {info.n_embd}", "1 or more")
    get_int(gguf, f"{name}.nextn_predict_layers", at_most=info.n_layer - 1)
    get_int(gguf, f"{name}.n_deepstack_layers", at_most=info.n_layer - 1)
    get_int(gguf, f"{name}.num_loops", at_least=1, at_most=_MAX_LAYERS // info.n_layer)
    get_int(gguf, f"{name}.attention.shared_kv_layers", at_most=max(info.n_layer - 2, 0))
    get_int(gguf, f"{name}.full_attention_interval", at_least=1, at_most=_MAX_LAYERS)
    get_per_layer(gguf, f"{name}.attention.recurrent_layers", info.n_layer, at_most=1)
    get_int(gguf, f"{name}.shortconv.l_cache", at_least=2, at_most=_MAX_WIDTH)
    if name in _STATE_SPACES:
        _check_state_space(gguf, info)
    if get_int(gguf, f"{name}.attention.sliding_window", at_most=_MAX_WIDTH):
        pattern = gguf.metadata.get(f"{name}.attention.sliding_window_pattern")
        if pattern == 1 or (isinstance(pattern, GGUFArray) and not any(list(pattern)[: info.n_layer])):
            found = f"{name}.attention.sliding_window_pattern gives no layer a window"
            _refuse(gguf, found, "one at least, as there is a sliding_window")
    if name in _LAYERS:
        blocks = {tensor.split(".")[1] for tensor in gguf.tensors if tensor.startswith("blk.")}
        odd = blocks ^ {str(i) for i in range(info.n_layer)}
        if odd:
            found = f"{name}.block_count is {info.n_layer}, and the tensors are of {len(blocks)} layers"
            _refuse(gguf, found, f"the same (layer {min(odd)[:20]!r} is in one of the two only)")


def _check_state_space(gguf: GGUF, info: ModelInfo) -> None:
    """Refuse sizes of Mamba-2 mixers that do not divide each other; what is missing, llama.cpp names itself."""
    kinds = ("inner_size", "time_step_rank", "group_count", "state_size", "conv_kernel")
    keys = [f"{info.architecture}.ssm.{kind}" for kind in kinds]
    found = [get_int(gguf, key, at_least=1, at_most=_MAX_WIDTH) or 1 for key in keys if key in gguf.metadata]
    if len(found) < len(keys):
        return
    n_inner, n_head, n_group, _, length = found
    if n_inner % n_head or n_head % n_group or length == 1:
        _refuse(
            gguf, f"{', '.join(keys)} are {found}", "each of the first two a multiple of the next, and 2 or more last"
        )
    if info.architecture in _TWICE_AS_WIDE and n_inner != 2 * info.n_embd:
        _refuse(gguf, f"{keys[0]} is {n_inner}", f"{2 * info.n_embd}, twice the embedding length")


def _check_heads(gguf: GGUF, info: ModelInfo) -> None:
    name = info.architecture
    n_key_swa = get_int(gguf, f"{name}.attention.key_length_swa", at_most=_MAX_WIDTH) or info.key_length
    get_int(gguf, f"{name}.attention.value_length_swa", at_most=_MAX_WIDTH)
    for i, (n_head, n_head_kv) in enumerate(zip(info.n_head, info.n_head_kv, strict=True)):
        if n_head and n_head_kv and n_head % n_head_kv:
            _refuse(gguf, f"layer {i} has {n_head} heads and {n_head_kv} KV heads", "a multiple of the KV heads")
    if not info.n_head[0]:
        if name in _LAYERS:
            _refuse(gguf, f"{name}.attention.head_count is 0", "1 or more")
        return
    n_key, n_value = info.key_length, info.value_length
    for which, length in (("key_length", n_key), ("value_length", n_value)):
        if length < 1:
            _refuse(gguf, f"{name}.attention.{which} is {length}", "1 or more")
    # llama.cpp would loop for ever without a rotation; architectures that have none say 0.
    at_least = 0 if info.has_recurrent_state or name in _NO_ROTATION else 2
    n_rotated_swa = get_int(gguf, f"{name}.rope.dimension_count_swa", at_most=_MAX_COUNT)
    _check_sections(gguf, name, n_key)
    rotations = (
        ("dimension_count", info.n_rot, n_key),
        ("dimension_count_swa", info.n_rot if n_rotated_swa is None else n_rotated_swa, n_key_swa),
    )
    for key, n_rotated, most in rotations:
        if n_rotated % 2 or not at_least <= n_rotated <= most:
            expected = f"an even number from {at_least} up to the key length {most}"
            _refuse(gguf, f"{name}.rope.{key} is {n_rotated}", expected)
    if name in _WHOLE_HEADS and not n_key == n_value == info.n_rot:
        found = f"a key has the length {n_key}, a value {n_value}, and {info.n_rot} are rotated"
        _refuse(gguf, found, f"the same three times for the architecture {name}")


def _check_sections(gguf: GGUF, name: str, n_key: int) -> None:
    """Refuse sections of a rotation that llama.cpp ends the process over."""
    found = get_array(gguf, f"{name}.rope.dimension_sections", WHOLE) if name in _SECTIONED else None
    if found is not None and not (min(found.numpy()[:4], default=-1) >= 0 and 0 < sum(found.numpy()[:3]) <= n_key):
        _refuse(gguf, f"{name}.rope.dimension_sections is {found.numpy()[:8].tolist()}", "some pairs of a head in each")


def _check_experts(gguf: GGUF, info: ModelInfo) -> None:
    name, n = info.architecture, info.n_expert
    n_used = info.n_expert_used
    if n > _MAX_EXPERTS or n_used > n or (n > 0) != (n_used > 0):
        _refuse(gguf, f"{n_used} of {n} experts are used", f"1 up to all of at most {_MAX_EXPERTS}, or 0 of 0")
    if not n and name in _ONLY_EXPERTS:
        _refuse(gguf, "it has no experts", f"some in the architecture {name}")
    at_least = 1 if name == "smallthinker" else 0
    gating = get_int(gguf, f"{name}.expert_gating_func", at_least=at_least, at_most=_MOST_GATING)
    if gating is None and at_least:
        _refuse(gguf, f"there is no {name}.expert_gating_func", "1 or 2")
    n_groups = get_int(gguf, f"{name}.expert_group_count", at_most=_MAX_COUNT) or 0
    n_groups_used = get_int(gguf, f"{name}.expert_group_used_count", at_most=_MAX_COUNT) or 0
    if n_groups > 1 and not (n_groups < n and n % n_groups == 0 and 0 < n_groups_used < n_groups):
        found = f"{n} experts are in {n_groups} groups, {n_groups_used} of them used"
        _refuse(gguf, found, "fewer groups than experts, of one size, and some but not all used")
    if n_groups == 1 and n < 2:
        _refuse(gguf, f"{n} experts are in 1 group", "2 experts or more")


def _check_numbers(gguf: GGUF, name: str) -> None:
    """Refuse numbers that no activation can be divided by or scaled with."""
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"):
        epsilon = get_float(gguf, f"{name}.{key}")
        if epsilon is not None and not 0 <= epsilon < 1:
            _refuse(gguf, f"{name}.{key} is {epsilon}", "0 or more, and below 1")
    for key in ("rope.freq_base", "rope.freq_base_swa"):
        base = get_float(gguf, f"{name}.{key}")
        if base is not None and base <= 0:
            _refuse(gguf, f"{name}.{key} is {base}", "more than 0")
    for key in ("factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier", "alpha"):
        get_float(gguf, f"{name}.rope.scaling.{key}")
    scaling = get_text(gguf, f"{name}.rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        _refuse(gguf, f"{name}.rope.scaling.type is {scaling[:40]!r}", " or ".join(_ROPE_SCALINGS))


def _check_types(gguf: GGUF) -> None:
    """Refuse tensors of types that llama.cpp has no kernels for; what it adds or multiplies by element must be F32."""
    for name, tensor in gguf.tensors.items():
        stem, _, kind = name.rpartition(".")
        role = stem.rpartition(".")[2] if kind in ("weight", "bias") else kind
        is_table = tensor.type in _IDS and (not role.startswith(_COMPUTED) or role.endswith("2eid"))
        if tensor.type in _NO_WEIGHT or (tensor.type in _IDS and not is_table):
            _refuse(gguf, f"{name} is of the type {tensor.type.name}", "a type of weights")
        is_vector = len(tensor.shape) == 1 and not is_table
        if (is_vector or kind == "bias" or role.endswith("_norm") or role in _ONLY_F32) and tensor.type != GGMLType.F32:
            _refuse(gguf, f"{name} is of the type {tensor.type.name}", "F32")
    for name in ("output.scale", "output.input_scale"):
        if name in gguf.tensors and "output.weight" not in gguf.tensors:
            _refuse(gguf, f"there is {name} without output.weight", "both or none of them")


def _check_shapes(gguf: GGUF, info: ModelInfo) -> None:
    sizes = _sizes(gguf, info)
    for name, letters in _TOP.items():
        is_known = info.architecture in _LAYERS and (name in gguf.tensors or name != "output.weight")
        if name == "token_embd.weight" or is_known:
            _check_shape(gguf, name, letters, sizes)
    layer = _LAYERS.get(info.architecture, {})
    if info.n_expert:
        layer = {role: letters for role, letters in layer.items() if role not in _DENSE}
    if layer and (len(set(info.n_head)) > 1 or len(set(info.n_head_kv)) > 1):
        _refuse(gguf, "the layers differ in their numbers of heads", f"one number for {info.architecture}")
    for i in range(info.n_layer):
        is_fused = f"blk.{i}.attn_qkv.weight" in gguf.tensors
        if is_fused and layer:
            _check_shape(gguf, f"blk.{i}.attn_qkv.weight", "ea", sizes)
        for role, letters in layer.items():
            if not (is_fused and role in ("attn_q", "attn_k", "attn_v")):
                _check_shape(gguf, f"blk.{i}.{role}.weight", letters, sizes)
    if info.n_expert and info.architecture in _MIXTURES:
        n_dense = get_int(gguf, f"{info.architecture}.leading_dense_block_count", at_most=info.n_layer) or 0
        widths = info.n_ff if info.n_ff is not None and any(info.n_ff) else (1,) * info.n_layer
        for i in (i for i in range(n_dense, info.n_layer) if widths[i]):
            for role, letters in _MIXTURES[info.architecture].items():
                _check_shape(gguf, f"blk.{i}.{role}.weight", letters, sizes)


def _sizes(gguf: GGUF, info: ModelInfo) -> Mapping[str, int | None]:
    """Return the sizes that the letters of shapes stand for; None stands for any size."""
    n_head_kv, n_key = info.n_head_kv[0], info.key_length
    q, k, v = info.n_head[0] * n_key, n_head_kv * n_key, n_head_kv * info.value_length
    sizes: dict[str, int | None] = {"e": info.n_embd, "n": info.n_vocab, "h": n_key, "f": None, "g": None}
    sizes |= {"x": info.n_expert, "w": _width(gguf, info, "expert"), "s": _width(gguf, info, "expert_shared")}
    if info.n_ff is not None and len(set(info.n_ff)) == 1:
        sizes |= {"f": info.n_ff[0], "g": 2 * info.n_ff[0]}
    return sizes | {"q": q, "k": k, "v": v, "a": q + k + v}


def _width(gguf: GGUF, info: ModelInfo, which: str) -> int | None:
    """Return the width of the experts, or of the one that all tokens go through; None where the file does not say."""
    return get_int(gguf, f"{info.architecture}.{which}_feed_forward_length", at_most=_MAX_WIDTH) or None


def _check_shape(gguf: GGUF, name: str, letters: str, sizes: Mapping[str, int | None]) -> None:
    tensor = gguf.tensors.get(name)
    expected = tuple(sizes[letter] for letter in letters)
    if tensor is None:
        _refuse(gguf, f"there is no tensor {name}", f"one of the shape {expected}")
    # Missing dimensions are 1.
    shape = tensor.shape + (1,) * (len(expected) - len(tensor.shape))
    wanted = expected + (1,) * (len(shape) - len(expected))
    if any(size not in (found, None) for found, size in zip(shape, wanted, strict=True)):
        _refuse(gguf, f"{name} has the shape {tensor.shape}", f"{expected} by the metadata")


def _check_vocabulary(gguf: GGUF, n_vocab: int) -> None:
    tokens = get_array(gguf, "tokenizer.ggml.tokens", frozenset({ValueType.STRING}))
    if tokens is None:
        return
    scores = get_array(gguf, "tokenizer.ggml.scores", frozenset({ValueType.FLOAT32, ValueType.INT32}))
    kinds = get_array(gguf, "tokenizer.ggml.token_type", frozenset({ValueType.INT32}))
    for which, array in (("scores", scores), ("token_type", kinds)):
        if array is not None and len(array) != n_vocab:
            _refuse(gguf, f"tokenizer.ggml.{which} has {len(array)} elements", f"{n_vocab}, one for each token")
    texts = _texts(tokens)
    longest = max(map(len, texts), default=0)
    if longest > _MAX_TOKEN_BYTES:
        _refuse(gguf, f"the vocabulary has a token of {longest} bytes", f"at most {_MAX_TOKEN_BYTES}")
    distinct = set(texts)
    if len(distinct) != n_vocab:
        twice, _ = Counter(texts).most_common(1)[0]
        _refuse(gguf, f"the vocabulary has the token {twice[:40]!r} more than once", "every token once")
    _check_tokenizer(gguf, n_vocab, distinct)


def _texts(tokens: GGUFArray) -> list[bytes]:
    """Return the tokens as llama.cpp sees them: up to a NUL byte, and under a made-up name where nothing is left."""
    texts = tokens.strings()
    if b"" in texts or b"\0" in b"".join(texts):
        return [text.partition(b"\0")[0] or b"[EMPTY_%d]" % i for i, text in enumerate(texts)]
    return texts


def _check_tokenizer(gguf: GGUF, n_vocab: int, texts: set[bytes]) -> None:
    """Refuse a vocabulary that lacks tokens which llama.cpp's tokenizer of its kind takes for granted."""
    model = get_text(gguf, "tokenizer.ggml.model")
    if model == "llama":
        bare = [byte for byte in _TEXT_BYTES if b"<0x%02X>" % byte not in texts and bytes([byte]) not in texts]
        if bare:
            found = f"the vocabulary has no token for {len(bare)} bytes, such as <0x{bare[0]:02X}>"
            _refuse(gguf, found, "one for each byte of UTF-8, to spell out what no other token covers")
    if model == "rwkv":
        bare = sorted(set(_TEXT_BYTES) - _spelled_bytes(texts))
        if bare:
            found = f"the vocabulary has no token for {len(bare)} bytes, such as \\x{bare[0]:02x}"
            _refuse(gguf, found, "one for each byte of UTF-8")
    if model == "t5":
        _check_replacements(gguf)
    if model == "plamo2" and sum(len(text) ** 3 for text in texts) > _MAX_SUFFIX_COST:
        _refuse(gguf, "the vocabulary of the tokenizer plamo2 is of long tokens", "short ones, or loading takes hours")
    if model == "bert":
        kinds = get_array(gguf, "tokenizer.ggml.token_type", frozenset({ValueType.INT32}))
        if kinds is not None and np.any(kinds.numpy() == _BYTE_KIND):
            _refuse(gguf, "tokens of the tokenizer bert are bytes", "none of that kind")
        _check_special(gguf, "seperator", 102, n_vocab)
    adds_bos = get_bool(gguf, "tokenizer.ggml.add_bos_token")
    pre = "gemma4" if model == "gemma4" else get_text(gguf, "tokenizer.ggml.pre")
    if adds_bos is None or pre == "gemma4":
        adds_bos = model == "llama" or (model in _BPE and pre in _ADDS_BOS)
    if model == "bert" or (adds_bos and (model in _BPE or model in ("llama", "t5"))):
        _check_special(gguf, "bos", _DEFAULT_BOS.get(model), n_vocab)
    adds_eos = get_bool(gguf, "tokenizer.ggml.add_eos_token")
    if (adds_eos and (model in _BPE or model in ("llama", "t5"))) or (adds_eos is None and model == "t5"):
        _check_special(gguf, "eos", _DEFAULT_EOS.get(model), n_vocab)


def _check_special(gguf: GGUF, which: str, default: int | None, n_vocab: int) -> None:
    """Refuse a token that is added to every text and does not exist: the metadata's, else the tokenizer's default."""
    key = f"tokenizer.ggml.{which}_token_id"
    token_id = gguf.metadata.get(key)
    known = (token_id, default)
    if not any(type(n) is int and 0 <= n < n_vocab for n in known):
        _refuse(gguf, f"every text gets the token {which}, and {key} is {token_id}", f"a token, 0 to {n_vocab - 1}")


def _spelled_bytes(texts: set[bytes]) -> set[int]:
    r"""Return the bytes that have a token of their own, spelled as in RWKV's vocabularies.

    >>> sorted(_spelled_bytes({b"A", rb"\n", rb"\x01", b"AB"}))
    [1, 10, 65]
    """
    spelled = {text[0] for text in texts if len(text) == 1 and text != b"\\"}
    letters = {ord("t"): 9, ord("n"): 10, ord("r"): 13}
    spelled |= {letters.get(text[1], text[1]) for text in texts if len(text) == 2 and text[0] == 92 and text[1] != 120}
    hexadecimal = re.compile(rb"\\x[0-9a-f]{2}")
    return spelled | {int(text[2:], 16) for text in texts if len(text) == 4 and hexadecimal.fullmatch(text)}


def _check_replacements(gguf: GGUF) -> None:
    """Refuse a table of replaced characters (SentencePiece) whose steps lead outside of it.

    The table is a double array of 32-bit nodes; texts that end in NUL follow it. From node i a step with byte c goes to
    node (i ^ offset of i) ^ c. From a node that is marked as an end it goes to node i ^ offset of i, whose number is a
    place in the texts. llama.cpp ends the process where a step leads outside.
    """
    key = "tokenizer.ggml.precompiled_charsmap"
    array = get_array(gguf, key, frozenset({ValueType.INT8, ValueType.UINT8}))
    if array is None or not len(array):
        return
    n_bytes = int.from_bytes(array.data[:4], "little")
    texts = array.data[4 + n_bytes :]
    if not texts or texts[-1]:
        _refuse(
            gguf, f"{key} has {len(array)} bytes, {n_bytes} of them its table", "a table, then texts that end in NUL"
        )
    nodes = np.frombuffer(array.data[4 : 4 + n_bytes // 4 * 4], "<u4").astype(np.int64)
    offsets = (nodes >> 10) << ((nodes & 0x200) >> 6)
    targets = np.arange(len(nodes)) ^ offsets
    inner = nodes < 2**31
    ends = targets[inner & (nodes & 0x100 != 0)]
    if np.any((targets | 0xFF)[inner] >= len(nodes)) or np.any((nodes[ends] & (2**31 - 1)) >= len(texts)):
        _refuse(gguf, f"{key} leads outside its {len(nodes)} nodes and {len(texts)} bytes of text", "places inside")
