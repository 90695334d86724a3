"""Tiny random Hugging Face checkpoints, and the forward that transformers defines for them, in float64.

    weights = write_checkpoint(folder, TinyHF("llama"))
    logits = hf_logits(TinyHF("llama"), weights, [1, 2, 3])

The rotary embedding pairs element i of a head with i + head_dim / 2, as transformers' `rotate_half` does.
"""

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
N_VOCAB = 264
BEGIN, END, TOOL = 260, 261, 262
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


GRANITE = {
    "attention_multiplier": 0.2,
    "embedding_multiplier": 3.0,
    "logits_scaling": 4.0,
    "residual_multiplier": 0.7,
}


@dataclass(frozen=True, slots=True)
class TinyHF:
    """The kind of a checkpoint.

    Attributes:
        model_type: The name in config.json.
        rope: "rope_scaling" of config.json.
        dtype: Of all tensors.
        n_files: Number of shards.
        n_expert, n_expert_used: Experts of a layer and of a token, each n_ff wide; 0 for a feed-forward block.
        prefix: What the names of the text model's tensors begin with.
    """

    model_type: str = "llama"
    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 16
    n_ff: int = 96
    biases: bool = False
    tied: bool = False
    sliding_window: int = 8
    rope: Mapping[str, Any] | None = None
    dtype: str = "F32"
    n_files: int = 1
    prefix: str = "model."
    n_vocab: int = N_VOCAB
    n_expert: int = 0
    n_expert_used: int = 0
    seed: int = 0

    @property
    def is_gemma(self) -> bool:
        """Whether it is a gemma3."""
        return self.model_type.startswith("gemma3")


def write_checkpoint(folder: Path, tiny: TinyHF, config: Mapping[str, Any] | None = None) -> dict[str, F64]:
    """Write a checkpoint and return its weights by name without the prefix; `config` overrides keys of config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(tiny) | dict(config or {})))
    (folder / "tokenizer.json").write_text(json.dumps(byte_level_tokenizer()))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>"}, "chat_template": "{{ messages }}"})
    )
    stored = {name: _stored(values, tiny.dtype) for name, values in _weights(tiny).items()}
    names = {name: name if name.startswith("lm_head") else tiny.prefix + name for name in stored}
    shards: list[dict[str, Any]] = [{} for _ in range(tiny.n_files)]
    for i, (name, (data, _)) in enumerate(stored.items()):
        shards[i % tiny.n_files][names[name]] = (tiny.dtype, stored[name][1].shape, data)
    files = [f"model-{i + 1:05}-of-{tiny.n_files:05}.safetensors" for i in range(tiny.n_files)]
    if tiny.n_files == 1:
        files = ["model.safetensors"]
    else:
        weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for file, shard in zip(files, shards, strict=True):
        (folder / file).write_bytes(safetensors_bytes(shard))
    return {name: values.astype(np.float64) for name, (_, values) in stored.items()}


def safetensors_bytes(tensors: Mapping[str, tuple[str, Iterable[int], bytes]]) -> bytes:
    """Return a safetensors file with these tensors, given as dtype, shape and bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    raw_header = json.dumps(header).encode()
    return struct.pack("<Q", len(raw_header)) + raw_header + data


def hf_config(tiny: TinyHF) -> dict[str, Any]:
    """Return the content of config.json."""
    config = {
        "model_type": tiny.model_type,
        "vocab_size": tiny.n_vocab,
        "hidden_size": tiny.n_embd,
        "intermediate_size": tiny.n_ff,
        "num_hidden_layers": tiny.n_layer,
        "num_attention_heads": tiny.n_head,
        "num_key_value_heads": tiny.n_head_kv,
        "head_dim": tiny.head_dim,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000.0,
        "rope_scaling": tiny.rope,
        "tie_word_embeddings": tiny.tied,
        "eos_token_id": [END, TOOL],
    }
    if tiny.is_gemma:
        gemma = {
            "sliding_window": tiny.sliding_window,
            "query_pre_attn_scalar": tiny.head_dim,
            "rope_local_base_freq": 100,
        }
        config |= gemma | {"hidden_activation": "gelu_pytorch_tanh"}
    else:
        config["hidden_act"] = "silu"
    if tiny.n_expert:
        experts = {"num_experts": tiny.n_expert, "num_experts_per_tok": tiny.n_expert_used, "norm_topk_prob": True}
        config |= experts | {"moe_intermediate_size": tiny.n_ff}
    return config | (GRANITE if tiny.model_type == "granite" else {})


def letters() -> list[str]:
    """Return GPT-2's letter for each byte."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printing else chr(next(others)) for byte in range(256)]


def byte_level_tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json: one token per byte, 256 "he", 257 "ll", 258 "hell", 259 " w", 3 added ones."""
    tokens = [*letters(), "he", "ll", "hell", "\u0120w"]
    added = [("<|begin|>", True), ("<|end|>", True), ("<tool>", False)]
    pattern = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    pattern += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {
        "added_tokens": [
            {"id": BEGIN + i, "content": text, "special": special} for i, (text, special) in enumerate(added)
        ],
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, to_bytes]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        },
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": ["h e", ["l", "l"], "he ll", "\u0120 w"],
        },
    }


def sentencepiece_tokenizer() -> dict[str, Any]:
    """Return a tokenizer.json as gemma has it: bytes, then spaces and letters, and merges by score."""
    specials = ["<pad>", "<eos>", "<bos>", "<unk>"]
    tokens = [*specials, *(f"<0x{byte:02X}>" for byte in range(256))]
    return {
        "added_tokens": [{"id": i, "content": text, "special": True} for i, text in enumerate(specials)]
        + [{"id": 260, "content": "\u2581\u2581", "special": False}],
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"String": " "},
            "behavior": "MergedWithPrevious",
            "invert": False,
        },
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<bos>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "unk_token": "<unk>",
            "vocab": {
                token: i
                for i, token in enumerate(
                    [*tokens, "\u2581\u2581", "\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "bb", "abb"]
                )
            },
            "merges": ["\u2581 \u2581", "a b", "\u2581 a", "\u2581 ab", "\u2581a b", "b b", "a bb", "ab b"],
        },
    }


def hf_logits(tiny: TinyHF, weights: Mapping[str, F64], token_ids: Iterable[int]) -> F64:
    """Return float64[n, n_vocab], the logits of all rows of a chain."""
    ids = np.asarray(list(token_ids))
    scales = GRANITE if tiny.model_type == "granite" else dict.fromkeys(GRANITE, 1.0)
    x = weights["embed_tokens.weight"][ids] * (tiny.n_embd**0.5 if tiny.is_gemma else scales["embedding_multiplier"])
    residual = scales["residual_multiplier"]
    for layer in range(tiny.n_layer):
        own = {name.split(".", 2)[2]: w for name, w in weights.items() if name.startswith(f"layers.{layer}.")}
        after = "post_attention_layernorm.weight"
        if tiny.is_gemma or tiny.model_type == "olmo2":
            mixed = _attention(tiny, own, layer, _maybe_norm(tiny, x, own.get("input_layernorm.weight")))
            x = x + _norm(tiny, mixed, own[after])
            before = own.get("pre_feedforward_layernorm.weight")
            forward = _feed_forward(tiny, own, _maybe_norm(tiny, x, before))
            x = x + _norm(tiny, forward, own["post_feedforward_layernorm.weight"])
        else:
            x = x + _attention(tiny, own, layer, _norm(tiny, x, own["input_layernorm.weight"])) * residual
            x = x + _feed_forward(tiny, own, _norm(tiny, x, own[after])) * residual
    head = weights["embed_tokens.weight" if tiny.tied else "lm_head.weight"]
    logits: F64 = _norm(tiny, x, weights["norm.weight"]) @ head.T / scales["logits_scaling"]
    return logits


def _attention(tiny: TinyHF, own: Mapping[str, F64], layer: int, x: F64) -> F64:
    n, sliding = len(x), tiny.is_gemma and (layer + 1) % 6 != 0
    rotates = tiny.model_type != "smollm3" or (layer + 1) % 4 != 0

    def heads(name: str) -> F64:
        projected = x @ own[f"self_attn.{name}_proj.weight"].T + own.get(f"self_attn.{name}_proj.bias", np.float64(0))
        norm = own.get(f"self_attn.{name}_norm.weight")
        if tiny.model_type == "olmo2" and norm is not None:
            projected, norm = _norm(tiny, projected, norm), None
        return _maybe_norm(tiny, projected.reshape(n, -1, tiny.head_dim), norm)

    q, k, v = heads("q"), heads("k"), heads("v")
    if rotates:
        q, k = _rotate(tiny, q, sliding), _rotate(tiny, k, sliding)
    group = tiny.n_head // tiny.n_head_kv
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scale = GRANITE["attention_multiplier"] if tiny.model_type == "granite" else tiny.head_dim**-0.5
    scores = np.einsum("ihd,jhd->hij", q, k) * scale
    distance = np.arange(n)[:, None] - np.arange(n)
    hidden = (distance < 0) | (distance >= tiny.sliding_window if sliding else distance < 0)
    scores[:, hidden] = -np.inf
    scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = np.einsum("hij,jhd->ihd", scores, v).reshape(n, -1)
    result: F64 = mixed @ own["self_attn.o_proj.weight"].T
    return result


def _maybe_norm(tiny: TinyHF, x: F64, weight: F64 | None) -> F64:
    """Return the norm of x; x where there is none."""
    return x if weight is None else _norm(tiny, x, weight)


def _feed_forward(tiny: TinyHF, own: Mapping[str, F64], x: F64) -> F64:
    if not tiny.n_expert:
        return _block(tiny, own, "mlp", x)
    scores = x @ own["mlp.gate.weight"].T
    probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probabilities /= probabilities.sum(axis=-1, keepdims=True)
    least = np.sort(probabilities, axis=-1)[:, -tiny.n_expert_used, None]
    shares = np.where(probabilities >= least, probabilities, 0)
    shares /= shares.sum(axis=-1, keepdims=True)
    outputs = [_block(tiny, own, f"mlp.experts.{i}", x) * shares[:, i, None] for i in range(tiny.n_expert)]
    result: F64 = np.add.reduce(outputs)
    return result


def _block(tiny: TinyHF, own: Mapping[str, F64], name: str, x: F64) -> F64:
    gate = x @ own[f"{name}.gate_proj.weight"].T
    if tiny.is_gemma:
        gate = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
    else:
        gate = gate / (1 + np.exp(-gate))
    result: F64 = (gate * (x @ own[f"{name}.up_proj.weight"].T)) @ own[f"{name}.down_proj.weight"].T
    return result


def _norm(tiny: TinyHF, x: F64, weight: F64) -> F64:
    scale = 1 + weight if tiny.is_gemma else weight
    result: F64 = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale
    return result


def _rotate(tiny: TinyHF, x: F64, sliding: bool) -> F64:
    base, rope = (100.0, None) if sliding else (1000.0, tiny.rope)
    frequencies = _frequencies(base, tiny.head_dim, rope)
    angles = np.arange(len(x))[:, None] * np.concatenate([frequencies, frequencies])
    half = tiny.head_dim // 2
    rotated = np.concatenate([-x[..., half:], x[..., :half]], axis=-1)
    result: F64 = x * np.cos(angles)[:, None] + rotated * np.sin(angles)[:, None]
    return result


def _frequencies(base: float, head_dim: int, rope: Mapping[str, Any] | None) -> F64:
    plain = [base ** (-i / head_dim) for i in range(0, head_dim, 2)]
    if rope is None:
        return np.array(plain)
    if rope["rope_type"] == "linear":
        return np.array(plain) / float(rope["factor"])
    found = []
    for frequency in plain:
        wave = 2 * np.pi / frequency
        turns = rope["original_max_position_embeddings"] / wave
        if turns > rope["high_freq_factor"]:
            found.append(frequency)
        elif turns < rope["low_freq_factor"]:
            found.append(frequency / rope["factor"])
        else:
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            smooth = (turns - low) / (high - low)
            found.append((1 - smooth) * frequency / rope["factor"] + smooth * frequency)
    return np.array(found)


def _weights(tiny: TinyHF) -> dict[str, F32]:
    rng = np.random.default_rng(tiny.seed)
    n_q, n_kv = tiny.n_head * tiny.head_dim, tiny.n_head_kv * tiny.head_dim

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> F32:
        values: F32 = (rng.standard_normal((n_out, n_in)) * gain / n_in**0.5).astype(np.float32)
        return values

    def vector(n: int, mean: float) -> F32:
        return (mean + 0.1 * rng.standard_normal(n)).astype(np.float32)

    mean = 0.0 if tiny.is_gemma else 1.0
    is_olmo = tiny.model_type == "olmo2"
    norms = ["post_attention_layernorm"] if is_olmo else ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm"] if tiny.is_gemma else []
    norms += ["post_feedforward_layernorm"] if tiny.is_gemma or is_olmo else []
    weights = {"embed_tokens.weight": matrix(tiny.n_vocab, tiny.n_embd, 2.0)}
    for p in (f"layers.{i}" for i in range(tiny.n_layer)):
        weights |= {f"{p}.{norm}.weight": vector(tiny.n_embd, mean) for norm in norms}
        for name, n_out in (("q", n_q), ("k", n_kv), ("v", n_kv)):
            weights[f"{p}.self_attn.{name}_proj.weight"] = matrix(n_out, tiny.n_embd, 1.5)
            if tiny.biases:
                weights[f"{p}.self_attn.{name}_proj.bias"] = vector(n_out, 0.0)
        if tiny.model_type in ("qwen3", "qwen3_moe", "gemma3", "gemma3_text"):
            weights |= {f"{p}.self_attn.{name}_norm.weight": vector(tiny.head_dim, mean) for name in "qk"}
        if is_olmo:
            weights |= {f"{p}.self_attn.{name}_norm.weight": vector(n, mean) for name, n in (("q", n_q), ("k", n_kv))}
        weights[f"{p}.self_attn.o_proj.weight"] = matrix(tiny.n_embd, n_q)
        if tiny.n_expert:
            weights[f"{p}.mlp.gate.weight"] = matrix(tiny.n_expert, tiny.n_embd, 4.0)
        for block in [f"{p}.mlp.experts.{i}" for i in range(tiny.n_expert)] or [f"{p}.mlp"]:
            weights |= {f"{block}.{name}_proj.weight": matrix(tiny.n_ff, tiny.n_embd) for name in ("gate", "up")}
            weights[f"{block}.down_proj.weight"] = matrix(tiny.n_embd, tiny.n_ff)
    weights["norm.weight"] = vector(tiny.n_embd, mean)
    if not tiny.tied:
        weights["lm_head.weight"] = matrix(tiny.n_vocab, tiny.n_embd, 2.0)
    return weights


def _stored(values: F32, dtype: str) -> tuple[bytes, F32]:
    """Return a tensor's bytes in a dtype, and its numbers after the rounding."""
    if dtype == "BF16":
        halves = (values.view(np.uint32) >> 16).astype("<u2")
        return halves.tobytes(), (halves.astype(np.uint32) << 16).view(np.float32)
    kept = values.astype("<f2" if dtype == "F16" else "<f4")
    return kept.tobytes(), kept.astype(np.float32)
