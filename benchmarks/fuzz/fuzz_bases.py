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
    llama, llama_f16, qwen2 = _tiny("llama"), _tiny("llama", dtype="f16", tied=True), _tiny("qwen2")
    dense = "qwen3", "gemma2", "gemma3", "granite", "phi3-4k", "hunyuan-dense", "minicpm", "nanbeige", "qwen2vl"
    return [
        llama,
        _with_bpe(llama_f16, "gpt-2"),
        Source(llama.metadata | _scaled("llama"), llama.tensors | {"rope_freqs.weight": _vector(8)}),
        _tiny("llama", n_layer=1, n_embd=256, n_ff=256),
        _with_bpe(qwen2, "qwen2"),
        qwen2,
        _with_unigrams(llama),
        _mamba(llama),
        *(_small(name) for name in (*dense, "smallthinker", "qwen3moe", "qwen2moe", "lfm2")),
        *map(_state_space, ("granitehybrid", "falcon-h1-normed", "nemotron_h_moe", "mamba2")),
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
    renamed = {key.replace("llama.", "mamba.", 1): value for key, value in metadata.items()}
    return Source(renamed | {"general.architecture": "mamba"}, tensors)


def _state_space(name: str) -> Source:
    """Return a small model with Mamba-2 mixers."""
    space = StateSpace(n_inner=128, n_head=4, n_state=8, n_group=2)
    widths: dict[str, Any] = dict.fromkeys(("n_embd", "n_ff", "n_ff_expert", "n_ff_shared"), 64)
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
