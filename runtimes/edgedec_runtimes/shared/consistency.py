"""Refusing a GGUF whose header is well formed, but whose numbers contradict each other or the tensors.

llama.cpp itself refuses most wrong shapes. But it ends the process over a number that it only asserts, divides by or
indexes with: the checks here find those before llama.cpp sees them. They hold for every architecture; only the
architectures of `_LAYERS` (all their tensors are known) and `_WHOLE_HEADS` (heads are rotated whole) have further ones.
"""

from collections.abc import Mapping

from edgedec.gguf.file import GGUF, GGUFArray
from edgedec.gguf.metadata import WHOLE, get_array, get_float, get_int, get_per_layer, get_text
from edgedec.gguf.model_info import ModelInfo, describe
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.shared.encoders import encoder_fault
from edgedec_runtimes.shared.vocabulary_consistency import check_vocabulary, refuse

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # llama.cpp's
_MAX_WIDTH = 2**24  # far above any model; llama.cpp allocates by windows and lengths
_MAX_COUNT = 2**31 - 1
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")

# Architectures whose keys and values have one length, all of which is rotated.
_WHOLE_HEADS = frozenset(
    """
    apertus arcee arctic baichuan chameleon codeshell dbrx deepseek dots1 ernie4_5 ernie4_5-moe exaone falcon granite
    granitemoe grok grovemoe hunyuan-dense hunyuan-moe hunyuan_vl internlm2 jais2 llama maincoder minicpm mistral3
    olmo olmo2 olmoe orion paddleocr pangu-embedded plamo qwen2 qwen2moe qwen2vl qwen3 qwen3moe qwen3vl qwen3vlmoe
    seed_oss smallthinker smollm3 starcoder2 talkie xverse
    """.split()
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
        refuse(gguf, *fault)
    _check_experts(gguf, info)
    _check_numbers(gguf, info.architecture)
    _check_types(gguf)
    _check_shapes(gguf, info)
    check_vocabulary(gguf, info.n_vocab)


def _check_layers(gguf: GGUF, info: ModelInfo) -> None:
    name = info.architecture
    if not 1 <= info.n_layer <= _MAX_LAYERS:
        refuse(gguf, f"{name}.block_count is {info.n_layer}", f"1 to {_MAX_LAYERS}")
    if info.n_embd < 1:
        refuse(gguf, f"{name}.embedding_length is {info.n_embd}", "1 or more")
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
            actual = f"{name}.attention.sliding_window_pattern gives no layer a window"
            refuse(gguf, actual, "one at least, as there is a sliding_window")
    if name in _LAYERS:
        blocks = {tensor.split(".")[1] for tensor in gguf.tensors if tensor.startswith("blk.")}
        odd = blocks ^ {str(i) for i in range(info.n_layer)}
        if odd:
            actual = f"{name}.block_count is {info.n_layer}, and the tensors are of {len(blocks)} layers"
            refuse(gguf, actual, f"the same (layer {min(odd)[:20]!r} is in one of the two only)")


def _check_state_space(gguf: GGUF, info: ModelInfo) -> None:
    """Refuse sizes of Mamba-2 mixers that do not divide each other; what is missing, llama.cpp names itself."""
    kinds = ("inner_size", "time_step_rank", "group_count", "state_size", "conv_kernel")
    keys = [f"{info.architecture}.ssm.{kind}" for kind in kinds]
    sizes = [get_int(gguf, key, at_least=1, at_most=_MAX_WIDTH) or 1 for key in keys if key in gguf.metadata]
    if len(sizes) < len(keys):
        return
    n_inner, n_head, n_group, _, length = sizes
    if n_inner % n_head or n_head % n_group or length == 1:
        refuse(
            gguf, f"{', '.join(keys)} are {sizes}", "each of the first two a multiple of the next, and 2 or more last"
        )
    if info.architecture in _TWICE_AS_WIDE and n_inner != 2 * info.n_embd:
        refuse(gguf, f"{keys[0]} is {n_inner}", f"{2 * info.n_embd}, twice the embedding length")


def _check_heads(gguf: GGUF, info: ModelInfo) -> None:
    name = info.architecture
    n_key_swa = get_int(gguf, f"{name}.attention.key_length_swa", at_most=_MAX_WIDTH) or info.key_length
    get_int(gguf, f"{name}.attention.value_length_swa", at_most=_MAX_WIDTH)
    for i, (n_head, n_head_kv) in enumerate(zip(info.n_head, info.n_head_kv, strict=True)):
        if n_head and n_head_kv and n_head % n_head_kv:
            refuse(gguf, f"layer {i} has {n_head} heads and {n_head_kv} KV heads", "a multiple of the KV heads")
    if not info.n_head[0]:
        if name in _LAYERS:
            refuse(gguf, f"{name}.attention.head_count is 0", "1 or more")
        return
    n_key, n_value = info.key_length, info.value_length
    for which, length in (("key_length", n_key), ("value_length", n_value)):
        if length < 1:
            refuse(gguf, f"{name}.attention.{which} is {length}", "1 or more")
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
            refuse(gguf, f"{name}.rope.{key} is {n_rotated}", expected)
    if name in _WHOLE_HEADS and not n_key == n_value == info.n_rot:
        actual = f"a key has the length {n_key}, a value {n_value}, and {info.n_rot} are rotated"
        refuse(gguf, actual, f"the same three times for the architecture {name}")


def _check_sections(gguf: GGUF, name: str, n_key: int) -> None:
    """Refuse sections of a rotation that llama.cpp ends the process over."""
    sections = get_array(gguf, f"{name}.rope.dimension_sections", WHOLE) if name in _SECTIONED else None
    if sections is not None and not (
        min(sections.numpy()[:4], default=-1) >= 0 and 0 < sum(sections.numpy()[:3]) <= n_key
    ):
        refuse(
            gguf, f"{name}.rope.dimension_sections is {sections.numpy()[:8].tolist()}", "some pairs of a head in each"
        )


def _check_experts(gguf: GGUF, info: ModelInfo) -> None:
    name, n = info.architecture, info.n_expert
    n_used = info.n_expert_used
    if n > _MAX_EXPERTS or n_used > n or (n > 0) != (n_used > 0):
        refuse(gguf, f"{n_used} of {n} experts are used", f"1 up to all of at most {_MAX_EXPERTS}, or 0 of 0")
    if not n and name in _ONLY_EXPERTS:
        refuse(gguf, "it has no experts", f"some in the architecture {name}")
    at_least = 1 if name == "smallthinker" else 0
    gating = get_int(gguf, f"{name}.expert_gating_func", at_least=at_least, at_most=_MOST_GATING)
    if gating is None and at_least:
        refuse(gguf, f"there is no {name}.expert_gating_func", "1 or 2")
    n_groups = get_int(gguf, f"{name}.expert_group_count", at_most=_MAX_COUNT) or 0
    n_groups_used = get_int(gguf, f"{name}.expert_group_used_count", at_most=_MAX_COUNT) or 0
    if n_groups > 1 and not (n_groups < n and n % n_groups == 0 and 0 < n_groups_used < n_groups):
        actual = f"{n} experts are in {n_groups} groups, {n_groups_used} of them used"
        refuse(gguf, actual, "fewer groups than experts, of one size, and some but not all used")
    if n_groups == 1 and n < 2:
        refuse(gguf, f"{n} experts are in 1 group", "2 experts or more")


def _check_numbers(gguf: GGUF, name: str) -> None:
    """Refuse numbers that no activation can be divided by or scaled with."""
    for key in ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon", "attention.group_norm_epsilon"):
        epsilon = get_float(gguf, f"{name}.{key}")
        if epsilon is not None and not 0 <= epsilon < 1:
            refuse(gguf, f"{name}.{key} is {epsilon}", "0 or more, and below 1")
    for key in ("rope.freq_base", "rope.freq_base_swa"):
        base = get_float(gguf, f"{name}.{key}")
        if base is not None and base <= 0:
            refuse(gguf, f"{name}.{key} is {base}", "more than 0")
    for key in ("factor", "attn_factor", "yarn_beta_fast", "yarn_beta_slow", "yarn_log_multiplier", "alpha"):
        get_float(gguf, f"{name}.rope.scaling.{key}")
    scaling = get_text(gguf, f"{name}.rope.scaling.type")
    if scaling is not None and scaling not in _ROPE_SCALINGS:
        refuse(gguf, f"{name}.rope.scaling.type is {scaling[:40]!r}", " or ".join(_ROPE_SCALINGS))


def _check_types(gguf: GGUF) -> None:
    """Refuse tensors of types that llama.cpp has no kernels for; what it adds or multiplies by element must be F32."""
    for name, tensor in gguf.tensors.items():
        stem, _, kind = name.rpartition(".")
        role = stem.rpartition(".")[2] if kind in ("weight", "bias") else kind
        is_table = tensor.type in _IDS and (not role.startswith(_COMPUTED) or role.endswith("2eid"))
        if tensor.type in _NO_WEIGHT or (tensor.type in _IDS and not is_table):
            refuse(gguf, f"{name} is of the type {tensor.type.name}", "a type of weights")
        is_vector = len(tensor.shape) == 1 and not is_table
        if (is_vector or kind == "bias" or role.endswith("_norm") or role in _ONLY_F32) and tensor.type != GGMLType.F32:
            refuse(gguf, f"{name} is of the type {tensor.type.name}", "F32")
    for name in ("output.scale", "output.input_scale"):
        if name in gguf.tensors and "output.weight" not in gguf.tensors:
            refuse(gguf, f"there is {name} without output.weight", "both or none of them")


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
        refuse(gguf, "the layers differ in their numbers of heads", f"one number for {info.architecture}")
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
        refuse(gguf, f"there is no tensor {name}", f"one of the shape {expected}")
    # Missing dimensions are 1.
    shape = tensor.shape + (1,) * (len(expected) - len(tensor.shape))
    full_shape = expected + (1,) * (len(shape) - len(expected))
    if any(size not in (actual, None) for actual, size in zip(shape, full_shape, strict=True)):
        refuse(gguf, f"{name} has the shape {tensor.shape}", f"{expected} by the metadata")
