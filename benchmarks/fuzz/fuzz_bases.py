"""Sound models for fuzz_gguf.py to damage: headers alone, and tiny models that llama.cpp loads."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from support.models.gguf_writer import RawTensor, Typed, tiny_text_model
from support.models.real_models import models_dir
from support.models.state_spaces import StateSpace
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, tiny_metadata, tiny_tensors

from edgedec.gguf.file import GGUF, GGUFArray, ValueType, read_gguf

MAX_ARRAY = 40
_N_EXPERT = 4


@dataclass(frozen=True, slots=True)
class Source:
    """A model as the writer takes it."""

    metadata: dict[str, Any]
    tensors: dict[str, Any]


def header_sources() -> list[Source]:
    """Return models whose header is sound, and which llama.cpp would not run."""
    metadata, tensors = tiny_text_model()
    odd = {
        "general.alignment": 64,
        "nested": [[1, 2], ["x", "yz"], [[True], []]],
        "wide": Typed(ValueType.UINT64, 2**40),
        "double": Typed(ValueType.FLOAT64, 0.1),
        "bytes": np.arange(20, dtype=np.uint8),
        "flags": [True, False, True],
        "general.sampling.temp": 0.7,
        "general.sampling.top_k": 40,
        "llama.pooling_type": 0,
        "llama.vocab_size": 5,
        "llama.full_attention_interval": 2,
        "llama.attention.causal": True,
        "llama.attention.key_length": 2,
        "llama.attention.sliding_window": 16,
        "llama.attention.recurrent_layers": [True, False],
    }
    split = {"split.no": 0, "split.count": 1, "split.tensors.count": 5}
    found = [
        Source(metadata, tensors),
        Source(metadata | odd, tensors),
        Source(metadata | split, tensors),
        Source({"general.architecture": "llama"}, {}),
    ]
    real = models_dir() / "smollm2-135m.gguf"
    if real.is_file():
        found.append(cut_down(real))
    return found


def cut_down(path: Path) -> Source:
    """Return a real model's metadata with short arrays, and its tensors with one block each."""
    gguf = read_gguf(path)
    tensors = {
        name: RawTensor(t.type, (t.type.block_size, 1)[: len(t.shape)], bytes(t.type.block_bytes))
        for name, t in gguf.tensors.items()
    }
    return Source(_metadata(gguf, MAX_ARRAY), tensors)


def loadable_sources() -> list[Source]:
    """Return models that llama.cpp loads: many architectures, dense and with experts, three kinds of vocabulary."""
    llama, llama_f16 = _tiny("llama"), _tiny("llama", dtype="f16", tied=True)
    qwen2, wide = _tiny("qwen2"), _tiny("llama", n_layer=1, n_embd=256, n_ff=256)
    qwen3 = _with_head_norms(_renamed(llama, "llama", "qwen3"))
    return [
        llama,
        _with_bpe(llama_f16, "gpt-2"),
        _with_experts(llama),
        Source(llama.metadata | _scaled("llama"), llama.tensors | {"rope_freqs.weight": _vector(8)}),
        wide,
        _with_bpe(qwen2, "qwen2"),
        qwen2,
        _with_bpe(qwen3, "qwen2"),
        _with_experts(_with_bpe(_with_head_norms(_renamed(llama, "llama", "qwen3moe")), "qwen2")),
        _gemma(llama, "gemma3"),
        _gemma(llama, "gemma2"),
        _with_unigrams(llama),
        _renamed(Source(llama.metadata | _scaled("granite"), llama.tensors), "llama", "granite"),
        _with_fused_weights(llama),
        _mamba(llama),
        _lfm2(llama),
        *map(_state_space, ("granitehybrid", "falcon-h1-normed", "nemotron_h_moe", "mamba2")),
        *(_small(name) for name in ("hunyuan-dense", "minicpm", "nanbeige", "qwen2vl", "qwen3vl", "smallthinker")),
    ]


def _small(name: str) -> Source:
    """Return the tests' model of an architecture, with narrow layers."""
    tiny = replace(ARCHITECTURES[name], n_embd=64, n_head=4, n_head_kv=2, head_dim=16, n_ff=64, n_ff_expert=32)
    return Source(tiny_metadata(tiny), dict(tiny_tensors(tiny)))


def _tiny(architecture: Literal["llama", "qwen2"], **options: Any) -> Source:
    with tempfile.TemporaryDirectory() as directory:
        gguf = read_gguf(tiny_llama(Path(directory) / "tiny.gguf", architecture=architecture, **options))
        tensors = {name: RawTensor(t.type, t.shape, gguf.read_tensor_bytes(name)) for name, t in gguf.tensors.items()}
    return Source(_metadata(gguf), tensors)


def _metadata(gguf: GGUF, n_most: int | None = None) -> dict[str, Any]:
    """Return metadata as the writer takes it, with at most n_most elements of each array."""
    return {
        key: Typed(ValueType.ARRAY, v.tolist()[:n_most], v.element_type) if isinstance(v, GGUFArray) else v
        for key, v in gguf.metadata.items()
    }


def _vector(n: int) -> RawTensor:
    return RawTensor(0, (n,), np.ones(n, np.float32).tobytes())


def _renamed(source: Source, old: str, new: str) -> Source:
    """Return the model under the name of another architecture."""
    metadata = {key.replace(f"{old}.", f"{new}.", 1): value for key, value in source.metadata.items()}
    return Source(metadata | {"general.architecture": new}, source.tensors)


def _n_layer(source: Source) -> int:
    return int(source.metadata[f"{source.metadata['general.architecture']}.block_count"])


def _with_head_norms(source: Source) -> Source:
    """Add what Qwen 3 and Gemma 3 normalize queries and keys with."""
    names = (f"blk.{i}.attn_{which}_norm.weight" for i in range(_n_layer(source)) for which in "qk")
    return Source(source.metadata, source.tensors | {name: _vector(16) for name in names})


def _with_experts(source: Source) -> Source:
    """Put four experts in the place of each feed-forward, of which two are used."""
    name = source.metadata["general.architecture"]
    counts = {f"{name}.expert_count": _N_EXPERT, f"{name}.expert_used_count": 2}
    tensors: dict[str, Any] = {}
    for key, tensor in source.tensors.items():
        if ".ffn_norm" in key or ".ffn_" not in key:
            tensors[key] = tensor
            continue
        expert = key.replace(".weight", "_exps.weight")
        tensors[expert] = RawTensor(tensor.type, (*tensor.shape, _N_EXPERT), tensor.data * _N_EXPERT)
        if "ffn_gate" in key:
            n_embd = tensor.shape[0]
            data = np.linspace(-1, 1, n_embd * _N_EXPERT).astype(np.float32).tobytes()
            tensors[key.replace("ffn_gate", "ffn_gate_inp")] = RawTensor(0, (n_embd, _N_EXPERT), data)
    n_ff = source.metadata[f"{name}.feed_forward_length"]
    return Source(source.metadata | counts | {f"{name}.expert_feed_forward_length": n_ff}, tensors)


def _gemma(llama: Source, architecture: str) -> Source:
    """Return a tiny Gemma, with windowed layers."""
    source = _with_head_norms(_renamed(llama, "llama", architecture)) if architecture == "gemma3" else None
    source = source or _renamed(llama, "llama", architecture)
    keys = {"attention.sliding_window": 8, "attention.key_length": 16, "attention.value_length": 16}
    scales = {"rope.freq_base_swa": 1e4, "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}
    metadata = source.metadata | {f"{architecture}.{key}": value for key, value in (keys | scales).items()}
    names = ("post_attention_norm", "post_ffw_norm")
    norms = {f"blk.{i}.{name}.weight": _vector(64) for i in range(_n_layer(source)) for name in names}
    return Source(metadata, {k: t for k, t in source.tensors.items() if k != "output.weight"} | norms)


def _with_fused_weights(llama: Source) -> Source:
    """Return a tiny Phi 3: queries, keys and values are one matrix, so are the two of the feed-forward."""
    source = _renamed(llama, "llama", "phi3")
    tensors = dict(source.tensors)
    for i in range(_n_layer(source)):
        for fused, names in (("attn_qkv", ("attn_q", "attn_k", "attn_v")), ("ffn_up", ("ffn_gate", "ffn_up"))):
            parts = [tensors.pop(f"blk.{i}.{name}.weight") for name in names]
            n_out = sum(part.shape[1] for part in parts)
            data = b"".join(part.data for part in parts)
            tensors[f"blk.{i}.{fused}.weight"] = RawTensor(parts[0].type, (parts[0].shape[0], n_out), data)
    return Source(source.metadata, tensors)


def _mamba(llama: Source) -> Source:
    """Return a tiny Mamba, whose layers have a recurrent state and no attention."""
    sizes = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 8, "ssm.time_step_rank": 4}
    kept = {key: value for key, value in llama.metadata.items() if ".attention.head" not in key and ".rope" not in key}
    metadata = kept | {f"llama.{key}": value for key, value in sizes.items()}
    tensors = {name: tensor for name, tensor in llama.tensors.items() if "blk" not in name or "attn_norm" in name}
    shapes = {"in.weight": (64, 256), "conv1d.weight": (4, 128), "conv1d.bias": (128,), "x.weight": (128, 20)}
    shapes |= {"dt.weight": (4, 128), "dt.bias": (128,), "a": (8, 128), "d": (128,), "out.weight": (128, 64)}
    for name, shape in shapes.items():
        data = np.linspace(-1, 1, int(np.prod(shape))).astype(np.float32)
        tensors |= {f"blk.{i}.ssm_{name}": RawTensor(0, shape, data.tobytes()) for i in range(2)}
    return _renamed(Source(metadata, tensors), "llama", "mamba")


def _lfm2(llama: Source) -> Source:
    """Return a tiny LFM2, whose second layer has a short convolution in place of attention."""
    by_layer = Typed(ValueType.ARRAY, [2, 0], ValueType.INT32)
    metadata = llama.metadata | {"llama.attention.head_count_kv": by_layer, "llama.shortconv.l_cache": 3}
    norm = llama.tensors["output_norm.weight"]
    kept = {name: t for name, t in llama.tensors.items() if "blk.1.attn_" not in name and name != "output_norm.weight"}
    tensors = kept | {"token_embd_norm.weight": norm, "blk.1.attn_norm.weight": llama.tensors["blk.1.attn_norm.weight"]}
    tensors |= {f"blk.0.attn_{which}_norm.weight": _vector(16) for which in "qk"}
    for name, shape in {"in_proj": (64, 192), "conv": (3, 64), "out_proj": (64, 64)}.items():
        data = np.linspace(-1, 1, int(np.prod(shape))).astype(np.float32)
        tensors[f"blk.1.shortconv.{name}.weight"] = RawTensor(0, shape, data.tobytes())
    return _renamed(Source(metadata, tensors), "llama", "lfm2")


def _state_space(name: str) -> Source:
    """Return a small model with Mamba-2 mixers."""
    space = StateSpace(n_inner=128, n_head=4, n_state=8, n_group=2)
    widths = dict.fromkeys(("n_embd", "n_ff", "n_ff_expert", "n_ff_shared"), 64)
    tiny = replace(ARCHITECTURES[name], **widths, head_dim=16, space=space)
    return Source(tiny_metadata(tiny), dict(tiny_tensors(tiny)))


def _scaled(architecture: str) -> dict[str, Any]:
    """Return optional keys of a model with a stretched context."""
    keys = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 64,
        "rope.scaling.attn_factor": 1.0,
        "attention.scale": 0.25,
        "logit_scale": 1.0,
        "residual_scale": 1.0,
        "embedding_scale": 1.0,
        "vocab_size": 260,
    }
    return {f"{architecture}.{key}": value for key, value in keys.items()}


def _with_bpe(source: Source, pre: str) -> Source:
    """Replace the vocabulary with one of bytes, merges and special tokens, of the same size."""
    n = len(source.metadata["tokenizer.ggml.tokens"].value)
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    tokens = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    kinds = [1] * 256
    while len(tokens) < n:
        tokens.append(["<|im_start|>", "<|im_end|>", "he", "\u0120w"][len(tokens) - 256] if len(tokens) < 260 else "")
        kinds.append(3 if len(tokens) < 259 else 1)
    metadata = {k: v for k, v in source.metadata.items() if not k.startswith("tokenizer.ggml.")}
    return Source(
        metadata
        | {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": Typed(ValueType.ARRAY, kinds, ValueType.INT32),
            "tokenizer.ggml.merges": ["h e", "\u0120 w"],
            "tokenizer.ggml.bos_token_id": 256,
            "tokenizer.ggml.eos_token_id": 257,
            "tokenizer.ggml.add_bos_token": False,
        },
        source.tensors,
    )


def _with_unigrams(source: Source) -> Source:
    """Say that the vocabulary is one of unigrams, with a table of replaced characters."""
    table = np.zeros(257, "<u4")
    table[0] = 1024  # bytes of the table, of one block that matches nothing; what follows are replacements
    replaced = np.concatenate([table.view(np.uint8), np.zeros(4, np.uint8)])
    new = {"tokenizer.ggml.model": "t5", "tokenizer.ggml.precompiled_charsmap": replaced}
    return Source(source.metadata | new, source.tensors)
