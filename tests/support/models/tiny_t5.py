"""Random tiny T5s as GGUFs, and their forward in float64.

    t5 = TinyT5(seed=1)
    path = t5.write(tmp_path / "t5.gguf")
    logits = t5_logits(t5, t5.weights(), source_ids, text_ids)

The vocabulary has the three special tokens, a word each for a few, and the letters.
"""

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import ValueType
from support.models.gguf_writer import Typed, write_gguf

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
PAD, END, UNK = 0, 1, 2
WORDS = ("\u2581the", "\u2581a", "\u2581translate", "\u2581house", "\u2581is", "ing", "er", "\u2581small", "en", "st")
TOKENS = ("<pad>", "</s>", "<unk>", "\u2581", *string.ascii_letters, *string.digits, *string.punctuation, *WORDS)


def unigram(more: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the tokenizer's metadata."""
    kinds = [3, 3, 2] + [1] * (len(TOKENS) - 3)
    scores = [0.0, 0.0, 0.0, -2.0, *(-9.0 - i / 100 for i in range(len(TOKENS) - len(WORDS) - 4))]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": list(TOKENS),
        "tokenizer.ggml.scores": np.array([*scores, *(-5.0 - i / 8 for i in range(len(WORDS)))], np.float32),
        "tokenizer.ggml.token_type": Typed(ValueType.ARRAY, kinds, ValueType.INT32),
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.unknown_token_id": UNK,
        "tokenizer.ggml.padding_token_id": PAD,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
    } | (more or {})


def replacements(rules: dict[str, str]) -> NDArray[np.uint8]:
    """Return SentencePiece's table of replaced characters, in which each beginning of a key has 256 nodes."""
    by_key, texts = {key.encode(): text.encode() for key, text in rules.items()}, b""
    beginnings = sorted({key[:n] for key in by_key for n in range(len(key) + 1)})
    starts = {beginning: 256 * (i + 1) for i, beginning in enumerate(beginnings)}
    nodes = np.zeros(256 * (len(starts) + 1), "<u4")
    for beginning, start in starts.items():
        node = starts[beginning[:-1]] + beginning[-1] if beginning else 0
        nodes[node] = (node ^ start) << 10 | (beginning[-1] if beginning else 0)
        if beginning in by_key:
            nodes[node] |= 0x100
            nodes[start] = 2**31 | len(texts)
            texts += by_key[beginning] + b"\0"
    data = (4 * len(nodes)).to_bytes(4, "little") + nodes.tobytes() + texts
    return np.frombuffer(data, np.uint8)


@dataclass(frozen=True, slots=True)
class TinyT5:
    """The sizes of a model, in the proportions of flan-t5-small."""

    n_encoder: int = 3
    n_decoder: int = 2
    n_embd: int = 128
    n_head: int = 3
    head_dim: int = 32
    n_ff: int = 256
    n_buckets: int = 32
    n_ctx: int = 64
    gated: bool = True
    tied: bool = False
    dtype: type[np.floating[Any]] = np.float32
    seed: int = 0

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return random weights by their names in a GGUF, of `dtype` where they are matrices."""
        rng, e, q = np.random.default_rng(self.seed), self.n_embd, self.n_head * self.head_dim

        def matrix(n_out: int, n_in: int, gain: float = 1.0) -> NDArray[Any]:
            values: NDArray[Any] = gain / n_in**0.5 * rng.standard_normal((n_out, n_in))
            return values.astype(self.dtype)

        def norm() -> F32:
            return (1 + 0.1 * rng.standard_normal(e)).astype(np.float32)

        found = {"token_embd.weight": matrix(len(TOKENS), e, 4.0)}
        for side, n, prefixes in (("enc", self.n_encoder, ("attn",)), ("dec", self.n_decoder, ("attn", "cross_attn"))):
            for i in range(n):
                p = f"{side}.blk.{i}"
                for kind in prefixes:
                    found[f"{p}.{kind}_norm.weight"] = norm()
                    found |= {f"{p}.{kind}_{x}.weight": matrix(q, e, 0.4 if x in "qk" else 1.5) for x in "qkv"}
                    found[f"{p}.{kind}_o.weight"] = matrix(e, q)
                if i == 0:
                    found[f"{p}.attn_rel_b.weight"] = matrix(self.n_buckets, self.n_head, 2.0)
                found[f"{p}.ffn_norm.weight"] = norm()
                found |= {
                    f"{p}.ffn_{x}.weight": matrix(self.n_ff, e) for x in ("gate", "up") if self.gated or x == "up"
                }
                found[f"{p}.ffn_down.weight"] = matrix(e, self.n_ff)
            found[f"{side}.output_norm.weight"] = norm()
        return found if self.tied else found | {"output.weight": matrix(len(TOKENS), e, 3.0)}

    def write(self, path: Path, more: dict[str, Any] | None = None, kind: str = "t5") -> Path:
        """Write a GGUF, of the encoder alone where the kind is "t5encoder", and return its path."""
        metadata = {
            "general.architecture": "t5",
            "t5.context_length": self.n_ctx,
            "t5.embedding_length": self.n_embd,
            "t5.feed_forward_length": self.n_ff,
            "t5.block_count": self.n_encoder,
            "t5.decoder_block_count": self.n_decoder,
            "t5.attention.head_count": self.n_head,
            "t5.attention.key_length": self.head_dim,
            "t5.attention.value_length": self.head_dim,
            "t5.attention.layer_norm_epsilon": 1e-6,
            "t5.attention.layer_norm_rms_epsilon": 1e-6,
            "t5.attention.relative_buckets_count": self.n_buckets,
            "t5.decoder_start_token_id": PAD,
        }
        weights = self.weights()
        if kind == "t5encoder":
            metadata = {key.replace("t5", kind): value for key, value in metadata.items() if "decoder" not in key}
            metadata |= {"general.architecture": kind}
            weights = {name: w for name, w in weights.items() if not name.startswith(("dec.", "output"))}
        return write_gguf(path, metadata | unigram() | (more or {}), weights)


def t5_logits(t5: TinyT5, weights: dict[str, NDArray[Any]], source: Sequence[int], text: Sequence[int]) -> F64:
    """Return float64[len(text), n_vocab], the logits of a text's tokens, of which the first one begins it.

    Without a text it is what the encoder makes of the source, float64[len(source), n_embd].
    """
    w = {name: values.astype(np.float64) for name, values in weights.items()}

    def normed(x: F64, name: str) -> F64:
        root: F64 = np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6)
        return x / root * w[name]

    def attended(p: str, x: F64, seen: F64, bias: F64) -> F64:
        q, k, v = (
            (a @ w[f"{p}_{x}.weight"].T).reshape(len(a), t5.n_head, -1) for a, x in ((x, "q"), (seen, "k"), (seen, "v"))
        )
        scores = np.einsum("ihd,jhd->hij", q, k) + bias
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        found: F64 = np.einsum("hij,jhd->ihd", shares, v).reshape(len(x), -1) @ w[f"{p}_o.weight"].T
        return found

    def fed(p: str, x: F64) -> F64:
        up = x @ w[f"{p}.ffn_up.weight"].T
        if not t5.gated:
            return np.maximum(up, 0) @ w[f"{p}.ffn_down.weight"].T
        gate = x @ w[f"{p}.ffn_gate.weight"].T
        gate = gate / 2 * (1 + np.tanh((2 / math.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        found: F64 = (gate * up) @ w[f"{p}.ffn_down.weight"].T
        return found

    def run(side: str, n: int, x: F64, output: F64 | None) -> F64:
        table, m = w[f"{side}.blk.0.attn_rel_b.weight"], len(x)
        ranges = [[range_of(j - i, t5.n_buckets, both_ways=output is None) for j in range(m)] for i in range(m)]
        bias = table[np.array(ranges)].transpose(2, 0, 1)
        if output is not None:
            bias = bias + np.triu(np.full((m, m), -np.inf), 1)
        for p in (f"{side}.blk.{i}" for i in range(n)):
            h = normed(x, f"{p}.attn_norm.weight")
            x = x + attended(f"{p}.attn", h, h, bias)
            if output is not None:
                x = x + attended(f"{p}.cross_attn", normed(x, f"{p}.cross_attn_norm.weight"), output, np.zeros(1))
            x = x + fed(p, normed(x, f"{p}.ffn_norm.weight"))
        return normed(x, f"{side}.output_norm.weight")

    output = run("enc", t5.n_encoder, w["token_embd.weight"][list(source)], None)
    if not text:
        return output
    x = run("dec", t5.n_decoder, w["token_embd.weight"][list(text)], output)
    return x / t5.n_embd**0.5 @ w["token_embd.weight"].T if t5.tied else x @ w["output.weight"].T


def range_of(behind: int, n: int, *, both_ways: bool) -> int:
    """Return the range that a distance from a query on to a key is in, by whole numbers alone."""
    first = 0
    if both_ways:
        n //= 2
        first = n if behind > 0 else 0
    far, single = abs(behind) if both_ways else max(-behind, 0), n // 2
    if far < single:
        return first + far
    steps = 0  # the most for which (far / single) ** single >= (128 / single) ** steps
    while steps + 1 < single and far**single * single ** (steps + 1) >= 128 ** (steps + 1) * single**single:
        steps += 1
    return first + single + steps
