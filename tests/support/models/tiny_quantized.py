"""Random tiny models of the cpu runtime's architectures, with matrices of any of its tensor types.

    write_tiny(tmp_path / "m.gguf", Tiny("qwen3", types=("Q4_K", "Q6_K")))

Their matrices have the spread that trained ones of that size have.
"""

from collections.abc import Callable
from dataclasses import dataclass
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
from support.models.tiny_models import N_VOCAB, vocabulary

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
    "glm4": (*_INPUT_NORMS, *_POST_NORMS),
    "hunyuan-dense": (*_INPUT_NORMS, *_QK_NORMS),
    "lfm2": (*_INPUT_NORMS, *_QK_NORMS),
    "lfm2moe": (*_INPUT_NORMS, *_QK_NORMS),
    "gpt-oss": ("attn_norm.weight", *_BIASES, "post_attention_norm.weight", "attn_output.bias", "attn_sinks.weight"),
    "olmo2": (*_QK_NORMS, *_POST_NORMS),
    "olmoe": (*_INPUT_NORMS, *_QK_NORMS),
    "qwen2": (*_INPUT_NORMS, *_BIASES),
    "qwen2moe": (*_INPUT_NORMS, *_BIASES),
    "qwen2vl": (*_INPUT_NORMS, *_BIASES),
    "qwen3": (*_INPUT_NORMS, *_QK_NORMS),
    "qwen3vl": (*_INPUT_NORMS, *_QK_NORMS),
    "qwen3vlmoe": (*_INPUT_NORMS, *_QK_NORMS),
    "qwen3moe": (*_INPUT_NORMS, *_QK_NORMS),
    "seed_oss": ("attn_norm.weight", *_BIASES, "post_attention_norm.weight"),
}
# Which matrices its files keep as one, and of what parts.
_FUSED = {"glm4": _GATE_UP, "phi3": _QKV | _GATE_UP}
_TWO_DIVISORS = {"rope_factors_short.weight": 2, "rope_factors_long.weight": 40}
_DIVISORS = {"minicpm": _TWO_DIVISORS, "phi3": _TWO_DIVISORS}
_HYBRID = ("lfm2", "lfm2moe")
_WIDE_NORMS = ("olmo2", "olmoe")


@dataclass(frozen=True, slots=True)
class Tiny:
    """What kind of model; the defaults have the widths that every type's blocks fit.

    Attributes:
        types: Names of tensor types; every matrix has one of them at random.
        dealt: The matrices have the types in turn instead, so that none is missing.
        tied: There is no matrix of the head beside that of the embeddings.
        biases: Queries, keys and values have biases (qwen2 always).
        vectors: More vectors of every layer.
        rope_factors: There is a vector of what frequencies are divided by, as Llama 3 has; of phi3, two.
        rope_scale: Positions are divided by it ("linear" scaling); 1 for no such keys.
        sliding_window: Tokens that layers with a window see.
        convolutions: Layers that have a short convolution in place of attention.
        n_rot: Elements of a head that are rotated; None for all.
        n_expert, n_expert_used: Experts of a layer and of a token; 0 for a feed-forward block.
        n_dense: Layers from the first on that have a feed-forward block instead of experts.
        n_ff_expert, n_ff_shared: The width of an expert, and of the one that all tokens go through.
        keys: More metadata keys, below the architecture's name.
    """

    architecture: str = "llama"
    types: tuple[str, ...] = ("F32",)
    dealt: bool = False
    n_layer: int = 2
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 256
    n_ctx_train: int = 1024
    tied: bool = False
    biases: bool = False
    vectors: tuple[str, ...] = ()
    rope_factors: bool = False
    rope_scale: float = 1.0
    sliding_window: int = 8
    convolutions: tuple[int, ...] = ()
    n_rot: int | None = None
    n_expert: int = 0
    n_expert_used: int = 0
    n_dense: int = 0
    n_ff_expert: int = 256
    n_ff_shared: int = 0
    keys: tuple[tuple[str, Any], ...] = ()
    seed: int = 0

    @property
    def gain(self) -> float:
        """What the head's matrix is larger by, where the architecture divides logits by it."""
        return float(dict(self.keys).get("logit_scale", 1.0))


_YARN = (
    *(("rope.scaling.type", "yarn"), ("rope.scaling.factor", 8.0)),
    *(("rope.scaling.original_context_length", 16), ("rope.scaling.yarn_beta_fast", 4.0)),
)


def _sections(*n_pairs: int) -> tuple[tuple[str, Any], ...]:
    """Return the key that says how many pairs turn with a token's time, height and width."""
    return (("rope.dimension_sections", [*n_pairs, 0]),)


_LONGROPE = (("rope.scaling.attn_factor", 1.19), ("rope.scaling.original_context_length", 32))
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
}
"""One of every kind; the six layers of gemma3 are five that slide and one that sees everything."""
WINDOWED_EXAONE4 = Tiny(
    "exaone4",
    n_layer=64,
    n_embd=64,
    head_dim=16,
    n_ff=32,
    keys=(("attention.sliding_window", 8), ("attention.sliding_window_pattern", [True, True, True, False] * 16)),
)
"""The one with windows: llama.cpp tells it by its 64 layers. Its widths fit only floats."""
_NOT_EXPORTED = ("lfm2", "minicpm-longrope", "nanbeige", "nanbeige-whole", "phi3", "phi3-short")
EXPORTED = [name for name, tiny in ARCHITECTURES.items() if not tiny.n_expert and name not in _NOT_EXPORTED]
"""Those that are exported to ONNX: not those with experts, with convolutions, with loops
over layers, or with other turns in long contexts."""
_BY_NUMBER = ("exaone4", "gemma2", "gpt-oss", *_HYBRID, "smallthinker", "smollm3", "olmo2")
UNIFORM = [name for name, tiny in ARCHITECTURES.items() if tiny.architecture not in _BY_NUMBER]
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
    keys |= dict(tiny.keys)
    name = tiny.architecture.replace("phi", "phi ")  # a model called phi3 must have certain tokens
    general = {"general.architecture": tiny.architecture, "general.name": f"tiny {name} {tiny.seed}"}
    return general | {f"{tiny.architecture}.{key}": value for key, value in keys.items()} | vocabulary(N_VOCAB)


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
    tensors = {"token_embd.weight": matrix(N_VOCAB, n_embd, embedding_gain)}
    for i in range(tiny.n_layer):
        layer = {
            "attn_q.weight": matrix(n_q, n_embd, 1.5),
            "attn_k.weight": matrix(n_kv, n_embd, 1.5),
            "attn_v.weight": matrix(n_kv, n_embd, 1.5),
            "attn_output.weight": matrix(n_embd, n_q),
            "ffn_gate.weight": matrix(tiny.n_ff, n_embd),
            "ffn_up.weight": matrix(tiny.n_ff, n_embd),
            "ffn_down.weight": matrix(n_embd, tiny.n_ff),
        }
        for name, parts in _FUSED.get(tiny.architecture, {}).items():
            rows = sum(layer.pop(part).shape[1] for part in parts)
            layer[name] = matrix(rows, n_embd, 1.5 if name == "attn_qkv.weight" else 1.0)
        if tiny.n_expert and i >= tiny.n_dense:
            for name in ("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight"):
                del layer[name]
            layer |= _experts(tiny, matrix, rng)
        if i in tiny.convolutions:
            layer = {name: tensor for name, tensor in layer.items() if not name.startswith("attn_")}
            layer["shortconv.in_proj.weight"] = matrix(3 * n_embd, n_embd, 1.5)
            layer["shortconv.out_proj.weight"] = matrix(n_embd, n_embd)
            kernels = (rng.standard_normal(n_embd * _L_CACHE) / _L_CACHE**0.5).astype(np.float32)
            layer["shortconv.conv.weight"] = RawTensor(GGMLType.F32, (_L_CACHE, n_embd), kernels.tobytes())
        layer |= {name: _vector(n, mean, rng) for name, n, mean in _vectors(tiny, i)}
        tensors |= {f"blk.{i}.{name}": tensor for name, tensor in layer.items()}
    norm = "token_embd_norm.weight" if tiny.architecture in _HYBRID else "output_norm.weight"
    tensors[norm] = _vector(n_embd, 1.0, rng)
    if not tiny.tied:
        tensors["output.weight"] = matrix(N_VOCAB, n_embd, 2.0 * tiny.gain)
    n_pairs = (tiny.n_rot or tiny.head_dim) // 2
    divisors = _DIVISORS.get(tiny.architecture, {"rope_freqs.weight": 8}) if tiny.rope_factors else {}
    for name, most in divisors.items():
        values = np.linspace(1, most, n_pairs, dtype=np.float32)
        tensors[name] = RawTensor(GGMLType.F32, values.shape, values.tobytes())
    return tensors


def _experts(tiny: Tiny, matrix: Callable[..., RawTensor], rng: np.random.Generator) -> dict[str, RawTensor]:
    """Return the tensors of a layer's experts."""
    n, n_embd, n_ff = tiny.n_expert, tiny.n_embd, tiny.n_ff_expert

    # Gates and ups of gpt-oss go beyond their bound of 7 now and then.
    wide, narrow = (2.0, 0.25) if tiny.architecture == "gpt-oss" else (1.0, 1.0)

    def stacked(n_out: int, n_in: int, gain: float) -> RawTensor:
        found = matrix(n * n_out, n_in, gain)
        return RawTensor(found.type, (n_in, n_out, n), found.data)

    # Scores so far apart that the last of a token's experts counts for little: which one it is may change by rounding.
    # Half of all sigmoids are near 1 then, so tokens of lfm2moe go through more experts than that.
    router = (rng.standard_normal((n, n_embd)) * 4 / n_embd**0.5).astype(np.float32)
    found = {
        "ffn_gate_inp.weight": RawTensor(GGMLType.F32, (n_embd, n), router.tobytes()),
        "ffn_gate_exps.weight": stacked(n_ff, n_embd, wide),
        "ffn_up_exps.weight": stacked(n_ff, n_embd, wide),
        "ffn_down_exps.weight": stacked(n_embd, n_ff, narrow),
    }
    if tiny.n_ff_shared:
        found["ffn_gate_shexp.weight"] = matrix(tiny.n_ff_shared, n_embd)
        found["ffn_up_shexp.weight"] = matrix(tiny.n_ff_shared, n_embd)
        found["ffn_down_shexp.weight"] = matrix(n_embd, tiny.n_ff_shared)
    if tiny.architecture == "gpt-oss":
        for name, width in (("gate_exps", n_ff), ("up_exps", n_ff), ("down_exps", n_embd), ("gate_inp", 1)):
            bias = (0.3 * rng.standard_normal(n * width)).astype(np.float32)
            shape = (width, n) if width > 1 else (n,)
            found[f"ffn_{name}.bias"] = RawTensor(GGMLType.F32, shape, bias.tobytes())
    if tiny.architecture == "lfm2moe":
        found["exp_probs_b.bias"] = _vector(n, 0.0, rng)
    if tiny.architecture == "qwen2moe":
        found["ffn_gate_inp_shexp.weight"] = _vector(n_embd, 0.0, rng)
    return found


def _vectors(tiny: Tiny, layer: int) -> list[tuple[str, int, float]]:
    """Return name, length and mean of a layer's vectors."""
    n_q, n_kv = tiny.n_head * tiny.head_dim, tiny.n_head_kv * tiny.head_dim
    normed = (n_q, n_kv) if tiny.architecture in _WIDE_NORMS else (tiny.head_dim, tiny.head_dim)
    lengths = {
        **dict.fromkeys(_INPUT_NORMS, tiny.n_embd),
        **dict(zip(_BIASES, (n_q, n_kv, n_kv), strict=True)),
        **dict(zip(_QK_NORMS, normed, strict=True)),
        **dict.fromkeys(_POST_NORMS, tiny.n_embd),
    }
    lengths |= {"attn_output.bias": tiny.n_embd, "attn_sinks.weight": tiny.n_head}
    names = {*_VECTORS.get(tiny.architecture, _INPUT_NORMS), *(_BIASES if tiny.biases else ()), *tiny.vectors}
    names -= {*_QK_NORMS} if layer in tiny.convolutions else set()
    return [(name, n, 0.0 if name.endswith("bias") else 1.0) for name, n in lengths.items() if name in names]


def _vector(n: int, mean: float, rng: np.random.Generator) -> RawTensor:
    values = (mean + 0.1 * rng.standard_normal(n)).astype(np.float32)
    return RawTensor(GGMLType.F32, (n,), values.tobytes())
