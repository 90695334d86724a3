"""Random tiny models of the cpu runtime's architectures, with matrices of any of its tensor types.

    write_tiny(tmp_path / "m.gguf", Tiny("qwen3", types=("Q4_K", "Q6_K")))

Their matrices have the spread that trained ones of that size have.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import FLOATS
from edgedec.gguf.tensor_types import GGMLType
from edgedec_runtimes.weights.levels import LEVELS
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.random_blocks import random_blocks
from support.models.state_spaces import mixer_keys, mixer_tensors
from support.models.tiny_experts import DELTA, UNGATED, experts_of, random_vector
from support.models.tiny_gemma4 import (
    MEANS,
    expert_vectors,
    gemma4_keys,
    per_layer_tables,
    rope_divisors,
    token_parts,
)
from support.models.tiny_models import vocabulary
from support.models.tiny_recurrent import delta_keys, delta_tensors
from support.models.tiny_shapes import StateSpace as StateSpace
from support.models.tiny_shapes import Tiny as Tiny

FILE_SIZED = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ4_XS", "MXFP4", "Q3_K", "Q2_K", "TQ2_0", "Q2_0", "Q1_0"),
)
"""The types whose tiles have as many bytes as the file."""
WIDER = ("IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_M", "IQ1_S", "TQ1_0")
"""The types whose tiles have more bytes than the file."""
TILE_TYPES = FILE_SIZED + WIDER
EXPORTED_TYPES = tuple(name for name in TILE_TYPES if GGMLType[name] in FLOATS or GGMLType[name] in LEVELS)
"""Those that exports to ONNX take."""

U8 = NDArray[np.uint8]
_L_CACHE = 3  # of short convolutions
Fused = dict[str, tuple[str, ...]]
_QKV: Fused = {"attn_qkv.weight": ("attn_q.weight", "attn_k.weight", "attn_v.weight")}
_GATE_UP: Fused = {"ffn_up.weight": ("ffn_gate.weight", "ffn_up.weight")}
_INPUT_NORMS = ("attn_norm.weight", "ffn_norm.weight")
_QK_NORMS = ("attn_q_norm.weight", "attn_k_norm.weight")
_POST_NORMS = ("post_attention_norm.weight", "post_ffw_norm.weight")
_BIASES = ("attn_q.bias", "attn_k.bias", "attn_v.bias")
# What a layer's vectors are in an architecture's files; _INPUT_NORMS where nothing is said.
_VECTORS = {
    "exaone4": (*_QK_NORMS, *_POST_NORMS),
    "gemma2": (*_INPUT_NORMS, *_POST_NORMS),
    "gemma3": (*_INPUT_NORMS, *_QK_NORMS, *_POST_NORMS),
    "blockffn": (*_INPUT_NORMS, "ffn_gate_inp_norm.weight"),
    "gemma4": (*_INPUT_NORMS, *_QK_NORMS, *_POST_NORMS, "layer_output_scale.weight"),
    "glm4": (*_INPUT_NORMS, *_POST_NORMS),
    "hunyuan-dense": (*_INPUT_NORMS, *_QK_NORMS),
    "lfm2": (*_INPUT_NORMS, *_QK_NORMS),
    "lfm2moe": (*_INPUT_NORMS, *_QK_NORMS),
    "mamba2": ("attn_norm.weight",),
    "nemotron_h": ("attn_norm.weight",),
    "nemotron_h_moe": ("attn_norm.weight",),
    "gpt-oss": ("attn_norm.weight", *_BIASES, "post_attention_norm.weight", "attn_output.bias", "attn_sinks.weight"),
    "olmo2": (*_QK_NORMS, *_POST_NORMS),
    "olmoe": (*_INPUT_NORMS, *_QK_NORMS),
    "dream": (*_INPUT_NORMS, *_BIASES),
    "qwen2": (*_INPUT_NORMS, *_BIASES),
    "qwen2moe": (*_INPUT_NORMS, *_BIASES),
    "qwen2vl": (*_INPUT_NORMS, *_BIASES),
    "qwen3": (*_INPUT_NORMS, *_QK_NORMS),
    "qwen3vl": (*_INPUT_NORMS, *_QK_NORMS),
    "qwen3vlmoe": (*_INPUT_NORMS, *_QK_NORMS),
    "qwen3moe": (*_INPUT_NORMS, *_QK_NORMS),
    **dict.fromkeys(DELTA, ("attn_norm.weight", "post_attention_norm.weight", *_QK_NORMS)),
    "seed_oss": ("attn_norm.weight", *_BIASES, "post_attention_norm.weight"),
}
# Which matrices its files keep as one, and of what parts.
_FUSED = {"glm4": _GATE_UP, "phi3": _QKV | _GATE_UP}
_TWO_DIVISORS = {"rope_factors_short.weight": 2, "rope_factors_long.weight": 40}
_DIVISORS = {"minicpm": _TWO_DIVISORS, "phi3": _TWO_DIVISORS}
_HYBRID = ("lfm2", "lfm2moe")
_IN_FILES = {"falcon-h1": {"ffn_norm.weight": "ffn_norm"}}  # other names of vectors
_WIDE_NORMS = ("olmo2", "olmoe")


_SECTIONS = np.array([3, 3, 2, 0], np.int32)
_YARN = (
    *(("rope.scaling.type", "yarn"), ("rope.scaling.factor", 8.0)),
    *(("rope.scaling.original_context_length", 16), ("rope.scaling.yarn_beta_fast", 4.0)),
)


def _sections(*n_pairs: int) -> tuple[tuple[str, Any], ...]:
    """Return the key that says how many pairs turn with a token's time, height and width."""
    return (("rope.dimension_sections", [*n_pairs, 0]),)


_LONGROPE = (("rope.scaling.attn_factor", 1.19), ("rope.scaling.original_context_length", 32))
_GRANITE_4 = (
    *(("attention.scale", 0.1), ("embedding_scale", 3.0), ("logit_scale", 8.0), ("residual_scale", 0.7)),
    ("rope.scaling.finetuned", False),
)
_NEMOTRON_3 = (
    *(("attention.layer_norm_epsilon", 1e-5), ("expert_shared_count", 1), ("expert_group_count", 1)),
    *(("expert_group_used_count", 1), ("expert_gating_func", 2), ("expert_weights_norm", True)),
    ("expert_weights_scale", 2.5),
)
_SCALES = (("embedding_scale", 3.0), ("logit_scale", 8.0), ("residual_scale", 0.7))
ARCHITECTURES = {
    "llama": Tiny(),
    "llama3": Tiny(rope_factors=True, n_head_kv=1, tied=True),
    "llama-linear": Tiny(rope_scale=4.0, biases=True, vectors=("attn_output.bias",), n_head_kv=4),
    "qwen2": Tiny("qwen2", n_head=8, n_head_kv=4, head_dim=32),
    "qwen3": Tiny("qwen3", head_dim=128, tied=True),
    "gemma3": Tiny("gemma3", n_layer=6, n_head=2, n_head_kv=1, head_dim=128, tied=True),
    "granite": Tiny(
        "granite",
        keys=(("attention.scale", 0.1), ("embedding_scale", 3.0), ("logit_scale", 8.0), ("residual_scale", 0.7)),
    ),
    "hunyuan-dense": Tiny("hunyuan-dense", head_dim=128, tied=True),
    "minicpm": Tiny("minicpm", keys=_SCALES),
    "minicpm-longrope": Tiny("minicpm", rope_factors=True, keys=(*_SCALES, ("rope.scaling.type", "longrope"))),
    "nanbeige": Tiny("nanbeige", n_layer=3, keys=(("num_loops", 2), ("skip_loop_final_norm", False))),
    "nanbeige-whole": Tiny("nanbeige", keys=(("num_loops", 3), ("skip_loop_final_norm", True))),
    "qwen2vl": Tiny("qwen2vl", n_head=8, n_head_kv=4, head_dim=32, keys=_sections(4, 6, 6)),
    "qwen3vl": Tiny("qwen3vl", n_layer=4, head_dim=128, keys=(*_sections(24, 20, 20), ("n_deepstack_layers", 3))),
    "smollm3": Tiny("smollm3", n_layer=4, tied=True),
    "olmo2": Tiny("olmo2", n_head_kv=4),
    "olmo3": Tiny("olmo2", n_layer=4, keys=(("attention.sliding_window", 8), *_YARN)),
    "phi3": Tiny("phi3", rope_factors=True, n_rot=48, keys=(*_LONGROPE, ("attention.sliding_window", 64))),
    "phi3-short": Tiny("phi3", rope_factors=True, n_head_kv=4),
    "phi3-4k": Tiny("phi3", keys=(("attention.sliding_window", 64),)),
    "ernie4_5": Tiny("ernie4_5", n_head_kv=1, tied=True),
    "exaone4": Tiny("exaone4", rope_factors=True),
    "glm4": Tiny("glm4", n_rot=32, biases=True),
    "seed_oss": Tiny("seed_oss", n_head_kv=1),
    "gemma2": Tiny("gemma2", n_layer=2, n_head=2, n_head_kv=1, head_dim=128, tied=True),
    "gemma4": Tiny("gemma4", n_layer=6, head_dim=128, narrow=64, n_shared=3, n_per_layer=256, tied=True),
    "gemma4-moe": Tiny(
        "gemma4", n_layer=6, head_dim=128, narrow=64, keys_as_values=True, n_expert=8, n_expert_used=4, tied=True
    ),
    "lfm2": Tiny("lfm2", n_layer=4, convolutions=(0, 1, 3), tied=True),
    "mistral3": Tiny(
        "mistral3",
        keys=(*_YARN, ("rope.scaling.yarn_log_multiplier", 1.0), ("attention.temperature_scale", 0.1)),
    ),
    "gpt-oss": Tiny(
        "gpt-oss", n_head_kv=4, n_expert=8, n_expert_used=4, keys=(*_YARN, ("attention.sliding_window", 8))
    ),
    "lfm2moe": Tiny(
        "lfm2moe",
        n_layer=4,
        convolutions=(0, 1, 3),
        tied=True,
        n_expert=8,
        n_expert_used=6,
        n_dense=1,
        n_ff=512,
        keys=(("expert_gating_func", 2),),
    ),
    "qwen3moe": Tiny("qwen3moe", n_expert=16, n_expert_used=4),
    "qwen3vlmoe": Tiny("qwen3vlmoe", n_expert=16, n_expert_used=4, keys=_sections(11, 11, 10)),
    "smallthinker": Tiny(
        "smallthinker",
        n_layer=6,
        n_expert=8,
        n_expert_used=3,
        keys=(("attention.sliding_window", 4096), ("expert_gating_func", 2)),
    ),
    "smallthinker-softmax": Tiny("smallthinker", n_expert=8, n_expert_used=3, keys=(("expert_gating_func", 1),)),
    "olmoe": Tiny("olmoe", n_head_kv=4, n_expert=8, n_expert_used=4),
    "qwen2moe": Tiny(
        "qwen2moe", n_head=8, n_head_kv=4, head_dim=32, n_expert=8, n_expert_used=4, n_ff_shared=512, seed=1
    ),
    "qwen35": Tiny("qwen35", n_layer=4, recurrent=(0, 1, 3), n_rot=16, keys=(("rope.dimension_sections", _SECTIONS),)),
    "qwen35moe": Tiny(
        "qwen35moe",
        n_layer=4,
        recurrent=(0, 2, 3),
        n_rot=32,
        n_expert=8,
        n_expert_used=4,
        n_ff_shared=256,
        keys=(("rope.dimension_sections", _SECTIONS),),
    ),
    "qwen3next": Tiny(
        "qwen3next", n_layer=4, recurrent=(0, 1, 3), n_rot=32, n_expert=8, n_expert_used=4, n_ff_shared=256
    ),
    "granitemoe": Tiny(
        "granitemoe",
        n_expert=12,
        n_expert_used=5,
        keys=(("attention.scale", 0.1), ("embedding_scale", 3.0), ("logit_scale", 8.0), ("residual_scale", 0.7)),
    ),
    "granitemoe-shared": Tiny(
        "granitemoe",
        n_expert=12,
        n_expert_used=5,
        n_ff_shared=256,
        keys=(("embedding_scale", 3.0), ("logit_scale", 8.0), ("residual_scale", 0.7)),
    ),
    "granitehybrid": Tiny("granitehybrid", n_layer=4, parts=("MF", "AF", "MF", "MF"), keys=_GRANITE_4),
    "granitehybrid-moe": Tiny(
        "granitehybrid",
        n_layer=3,
        parts=("MF", "AF", "MF"),
        n_expert=12,
        n_expert_used=5,
        n_ff_shared=256,
        keys=_GRANITE_4,
    ),
    "falcon-h1": Tiny(
        "falcon-h1", parts=("AMF",) * 2, space=StateSpace(n_inner=256, n_head=16, n_state=40, is_normed=False)
    ),
    "falcon-h1-normed": Tiny(
        "falcon-h1", parts=("AMF",) * 2, space=StateSpace(n_inner=768, n_head=16, n_state=32, n_group=2)
    ),
    "nemotron_h": Tiny(
        "nemotron_h",
        n_layer=5,
        n_ff=1024,
        parts=("M", "F", "A", "F", "M"),
        space=StateSpace(n_inner=256, n_group=2),
        keys=(("attention.layer_norm_epsilon", 1e-5),),
    ),
    "nemotron_h_moe": Tiny(
        "nemotron_h_moe",
        n_layer=5,
        parts=("M", "F", "A", "F", "M"),
        space=StateSpace(n_group=4),
        n_expert=8,
        n_expert_used=6,
        n_ff_shared=512,
        keys=_NEMOTRON_3,
    ),
    "mamba2": Tiny("mamba2", n_layer=3, parts=("M",) * 3, space=StateSpace(n_group=2)),
}
"""One of every kind; the six layers of gemma3 are five that slide and one that sees everything."""
DIFFUSION = {"dream": Tiny("dream", n_head=8, n_head_kv=4, head_dim=32), "llada": Tiny("llada", n_head_kv=4)}
"""Diffusion language models whose rows all see each other."""
OWN = {"blockffn": Tiny("blockffn", n_expert=12, n_expert_used=12, keys=_SCALES)}
"""Those that llama.cpp does not have; their files are ours."""
WINDOWED_EXAONE4 = Tiny(
    "exaone4",
    n_layer=64,
    n_embd=64,
    head_dim=16,
    n_ff=32,
    keys=(("attention.sliding_window", 8), ("attention.sliding_window_pattern", [True, True, True, False] * 16)),
)
"""The one with windows: llama.cpp tells it by its 64 layers. Its widths fit only floats."""
_NOT_EXPORTED = ("gemma4", "lfm2", "minicpm-longrope", "nanbeige", "nanbeige-whole", "phi3", "phi3-short", "qwen35")
EXPORTED = [
    name for name, tiny in ARCHITECTURES.items() if not tiny.n_expert and not tiny.parts and name not in _NOT_EXPORTED
]
"""Those that are exported to ONNX: not those with experts, convolutions, states or loops over layers, or with other
turns in long contexts."""
_BY_NUMBER = (
    *("exaone4", "gemma2", "gemma4", "gpt-oss", "nanbeige", "olmo2", "qwen3vl", "qwen3vlmoe", "smallthinker"),
    *("smollm3", *_HYBRID, *DELTA),
)
UNIFORM = [name for name, tiny in ARCHITECTURES.items() if not tiny.parts and tiny.architecture not in _BY_NUMBER]
"""Those of which layers can be left out of a GGUF."""


def write_tiny(path: Path, tiny: Tiny, *, metadata: dict[str, Any] | None = None) -> Path:
    """Write a model and return its path; `metadata` adds or replaces keys."""
    return write_gguf(path, tiny_metadata(tiny) | (metadata or {}), tiny_tensors(tiny))


def tiny_metadata(tiny: Tiny) -> dict[str, Any]:
    """Return a model's metadata, with its vocabulary."""
    keys: dict[str, Any] = {
        "context_length": tiny.n_ctx_train,
        "embedding_length": tiny.n_embd,
        "block_count": tiny.n_layer,
        "feed_forward_length": tiny.n_ff,
        "attention.head_count": tiny.n_head,
        "attention.head_count_kv": tiny.n_head_kv,
        "attention.key_length": tiny.head_dim,
        "attention.value_length": tiny.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 100000.0,
        "rope.dimension_count": tiny.n_rot or tiny.head_dim,
    }
    if tiny.rope_scale != 1.0:
        keys |= {"rope.scaling.type": "linear", "rope.scaling.factor": tiny.rope_scale}
    if tiny.convolutions:
        n_head_kv = [0 if i in tiny.convolutions else tiny.n_head_kv for i in range(tiny.n_layer)]
        keys |= {"attention.head_count_kv": np.array(n_head_kv, np.int32), "shortconv.l_cache": _L_CACHE}
    if tiny.recurrent:
        keys |= delta_keys(tiny)
    if tiny.architecture in ("gemma2", "gemma3"):
        keys |= {"attention.sliding_window": tiny.sliding_window}
    if tiny.architecture == "gemma2":
        keys |= {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0}
    if tiny.n_expert:
        keys |= {"expert_count": tiny.n_expert, "expert_used_count": tiny.n_expert_used}
        keys |= {"expert_feed_forward_length": tiny.n_ff_expert}
        dense = {"leading_dense_block_count": tiny.n_dense}
        keys |= dense if tiny.n_dense else {"feed_forward_length": tiny.n_ff_expert}
        keys |= {"expert_shared_feed_forward_length": tiny.n_ff_shared} if tiny.n_ff_shared else {}
    if tiny.architecture == "gemma4":
        layers = range(tiny.n_layer)
        keys |= gemma4_keys(
            [tiny.slides(i) for i in layers],
            [tiny.heads(i)[0] for i in layers],
            [tiny.width(i) for i in layers],
            window=tiny.sliding_window,
            narrow=tiny.narrow,
            n_shared=tiny.n_shared,
            n_per_layer=tiny.n_per_layer,
        )
    if tiny.architecture in DIFFUSION:
        keys |= {"attention.causal": False}
    keys = _parts_keys(tiny, keys) if tiny.parts else keys
    keys |= dict(tiny.keys)
    name = tiny.architecture.replace("phi", "phi ")  # a model called phi3 must have certain tokens
    general: dict[str, Any] = {"general.architecture": tiny.architecture, "general.name": f"tiny {name} {tiny.seed}"}
    general |= {"tokenizer.ggml.mask_token_id": 3} if tiny.architecture in DIFFUSION else {}
    return general | {f"{tiny.architecture}.{key}": value for key, value in keys.items()} | vocabulary(tiny.n_vocab)


def tiny_tensors(tiny: Tiny) -> dict[str, RawTensor]:
    """Return a model's tensors."""
    rng = np.random.default_rng(tiny.seed)
    n_q, n_kv, n_embd = tiny.n_head * tiny.head_dim, tiny.n_head_kv * tiny.head_dim, tiny.n_embd

    in_turn = cycle(tiny.types)

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> RawTensor:
        name = next(in_turn) if tiny.dealt else tiny.types[rng.integers(len(tiny.types))]
        data = random_blocks(name, n_out, n_in, rng, gain / n_in**0.5)
        return RawTensor(GGMLType[name], (n_in, n_out), data)

    is_gemma = tiny.architecture.startswith("gemma")
    embedding_gain = 2.0 / (n_embd**0.5 if is_gemma and not tiny.tied else 1.0)
    tensors = {"token_embd.weight": matrix(tiny.n_vocab, n_embd, embedding_gain)}
    if tiny.architecture == "gemma4":
        tensors["rope_freqs.weight"] = rope_divisors(tiny.head_dim // 2)
    if tiny.n_per_layer:
        tensors |= per_layer_tables(tiny.n_layer, tiny.n_per_layer, n_embd, tiny.n_vocab, matrix)
        tensors["per_layer_proj_norm.weight"] = random_vector(tiny.n_per_layer, 1.0, rng)
    for i in range(tiny.n_layer):
        if tiny.architecture == "gemma4":
            n_kv, d = tiny.heads(i)
            n_q, n_kv = tiny.n_head * d, n_kv * d
        sizes: dict[str, tuple[Any, ...]] = {
            "attn_q.weight": (n_q, n_embd, 1.5),
            "attn_k.weight": (n_kv, n_embd, 1.5),
            "attn_v.weight": (n_kv, n_embd, 1.5),
            "attn_output.weight": (n_embd, n_q),
            "ffn_gate.weight": (tiny.width(i), n_embd),
            "ffn_up.weight": (tiny.width(i), n_embd),
            "ffn_down.weight": (n_embd, tiny.width(i)),
        }
        layer = {name: matrix(*size) for name, size in sizes.items() if _has(tiny, i, name)}
        for name, parts in _FUSED.get(tiny.architecture, {}).items():
            rows = sum(layer.pop(part).shape[1] for part in parts)
            layer[name] = matrix(rows, n_embd, 1.5 if name == "attn_qkv.weight" else 1.0)
        if tiny.n_expert and i >= tiny.n_dense and _has(tiny, i, "ffn"):
            if tiny.architecture != "gemma4":
                layer = {name: tensor for name, tensor in layer.items() if not name.startswith("ffn_")}
            layer |= experts_of(tiny, matrix, rng)
        layer = {name: tensor for name, tensor in layer.items() if name not in tiny.missing(i)}
        if tiny.n_per_layer:
            layer |= token_parts(tiny.n_per_layer, n_embd, matrix)
        if tiny.parts and tiny.has(i, "M"):
            layer |= mixer_tensors(tiny.space, n_embd, matrix, rng)
        if i in tiny.convolutions:
            layer = {name: tensor for name, tensor in layer.items() if not name.startswith("attn_")}
            layer["shortconv.in_proj.weight"] = matrix(3 * n_embd, n_embd, 1.5)
            layer["shortconv.out_proj.weight"] = matrix(n_embd, n_embd)
            kernels = (rng.standard_normal(n_embd * _L_CACHE) / _L_CACHE**0.5).astype(np.float32)
            layer["shortconv.conv.weight"] = RawTensor(GGMLType.F32, (_L_CACHE, n_embd), kernels.tobytes())
        if i in tiny.recurrent:
            layer = {name: tensor for name, tensor in layer.items() if not name.startswith("attn_")}
            layer |= delta_tensors(tiny, matrix, rng)
        elif tiny.architecture in DELTA:
            layer["attn_q.weight"] = matrix(2 * tiny.n_head * tiny.head_dim, n_embd, 1.5)  # each head's query and gate
        layer |= {name: random_vector(n, mean, rng) for name, n, mean in _vectors(tiny, i)}
        tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    norm = "token_embd_norm.weight" if tiny.architecture in _HYBRID else "output_norm.weight"
    tensors[norm] = random_vector(n_embd, 1.0, rng)
    if not tiny.tied:
        tensors["output.weight"] = matrix(tiny.n_vocab, n_embd, 2.0 * tiny.gain)
    n_pairs = (tiny.n_rot or tiny.head_dim) // 2
    divisors = _DIVISORS.get(tiny.architecture, {"rope_freqs.weight": 8}) if tiny.rope_factors else {}
    for name, most in divisors.items():
        values = np.linspace(1, most, n_pairs, dtype=np.float32)
        tensors[name] = RawTensor(GGMLType.F32, values.shape, values.tobytes())
    return tensors


def _vectors(tiny: Tiny, layer: int) -> list[tuple[str, int, float]]:
    """Return name, length and mean of a layer's vectors."""
    n_head_kv, d = tiny.heads(layer)
    n_q, n_kv = tiny.n_head * d, n_head_kv * d
    normed = (n_q, n_kv) if tiny.architecture in _WIDE_NORMS else (d, d)
    lengths = {
        **dict.fromkeys(_INPUT_NORMS, tiny.n_embd),
        **dict(zip(_BIASES, (n_q, n_kv, n_kv), strict=True)),
        **dict(zip(_QK_NORMS, normed, strict=True)),
        **dict.fromkeys(_POST_NORMS, tiny.n_embd),
    }
    lengths |= {"attn_output.bias": tiny.n_embd, "attn_sinks.weight": tiny.n_head}
    lengths |= {"ffn_gate_inp_norm.weight": tiny.n_expert}
    lengths |= {"layer_output_scale.weight": 1, "post_norm.weight": tiny.n_embd}
    names = {*_VECTORS.get(tiny.architecture, _INPUT_NORMS), *(_BIASES if tiny.biases else ()), *tiny.vectors}
    names -= {*_QK_NORMS} if layer in (*tiny.convolutions, *tiny.recurrent) else set()
    names -= {"attn_k_norm.weight"} if tiny.shares(layer) else set()
    names |= {"post_norm.weight"} if tiny.n_per_layer else set()
    means = {name: 0.0 if name.endswith("bias") else 1.0 for name in lengths}
    if tiny.architecture == "gemma4":
        means |= MEANS
        of_experts = dict(expert_vectors(tiny.n_embd, tiny.n_expert)) if tiny.n_expert else {}
        lengths, names, means = lengths | of_experts, names | of_experts.keys(), means | dict.fromkeys(of_experts, 1.0)
    other = _IN_FILES.get(tiny.architecture, {})
    return [(other.get(name, name), n, means[name]) for name, n in lengths.items() if name in names]


def _parts_keys(tiny: Tiny, keys: dict[str, Any]) -> dict[str, Any]:
    """Return metadata for layers that differ in their parts: one number where all have a part, else one for each."""

    def by_layer(part: str, number: int) -> Any:
        numbers = [number if tiny.has(layer, part) else 0 for layer in range(tiny.n_layer)]
        return np.array(numbers, np.int32) if len(set(numbers)) > 1 else numbers[0]

    if not any("A" in parts for parts in tiny.parts):
        keys = {name: value for name, value in keys.items() if name.partition(".")[0] not in ("attention", "rope")}
        heads = {"attention.head_count": 0, "attention.layer_norm_rms_epsilon": 1e-5}
    else:
        heads = {"attention.head_count_kv": by_layer("A", tiny.n_head_kv)}
    return keys | mixer_keys(tiny.space) | heads | {"feed_forward_length": by_layer("F", keys["feed_forward_length"])}


def _has(tiny: Tiny, layer: int, name: str) -> bool:
    """Return whether a layer has a matrix of attention or of a feed-forward block, or any of that name's beginning."""
    if not tiny.parts:
        return True
    is_left_out = tiny.architecture in UNGATED and name == "ffn_gate.weight"
    return tiny.has(layer, "A" if name.startswith("attn_") else "F") and not is_left_out
