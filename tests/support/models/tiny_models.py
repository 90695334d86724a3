"""Random tiny GGUF models that llama.cpp and the reference runtime both load.

    path = tiny_llama(tmp_path / "tiny.gguf", seed=1)

The vocabulary is SentencePiece's with byte fallback: <unk>, <s>, </s>, a token for the space, then 256 byte tokens.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import ValueType
from support.models.gguf_writer import Typed, write_gguf

UNK, BOS, EOS, SPACE, FIRST_BYTE = 0, 1, 2, 3, 4
N_VOCAB = FIRST_BYTE + 256
_NORMAL, _UNKNOWN, _CONTROL, _BYTE = 1, 2, 3, 6
CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tiny_llama(
    path: Path,
    *,
    seed: int = 0,
    n_layer: int = 2,
    n_embd: int = 64,
    n_head: int = 4,
    n_head_kv: int = 2,
    n_ff: int = 128,
    n_ctx_train: int = 256,
    architecture: Literal["llama", "qwen2"] = "llama",
    dtype: Literal["f32", "f16"] = "f32",
    tied: bool = False,
    chat_template: str | None = None,
    n_vocab: int = N_VOCAB,
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a model with random weights and return its path.

    The logits have a spread of about 2, so that sampling has something to choose from. `n_vocab` above 260 adds
    tokens that no text becomes. `more` is further metadata.
    """
    rng = np.random.default_rng(seed)
    head_dim = n_embd // n_head
    metadata: dict[str, Any] = {
        "general.architecture": architecture,
        "general.name": f"tiny {architecture} {seed}",
        f"{architecture}.context_length": n_ctx_train,
        f"{architecture}.embedding_length": n_embd,
        f"{architecture}.block_count": n_layer,
        f"{architecture}.feed_forward_length": n_ff,
        f"{architecture}.attention.head_count": n_head,
        f"{architecture}.attention.head_count_kv": n_head_kv,
        f"{architecture}.attention.layer_norm_rms_epsilon": 1e-5,
        f"{architecture}.rope.freq_base": 10000.0,
        f"{architecture}.rope.dimension_count": head_dim,
    } | vocabulary(n_vocab)
    if chat_template is not None:
        metadata["tokenizer.chat_template"] = chat_template
    metadata |= more or {}

    def matrix(n_out: int, n_in: int, gain: float = 1.0) -> NDArray[Any]:
        values: NDArray[Any] = rng.standard_normal((n_out, n_in)) * (gain / n_in**0.5)
        return values.astype(np.float16 if dtype == "f16" else np.float32)

    def vector(n: int, mean: float) -> NDArray[np.float32]:
        return (mean + 0.1 * rng.standard_normal(n)).astype(np.float32)

    tensors: dict[str, NDArray[Any]] = {"token_embd.weight": matrix(n_vocab, n_embd, 2.0)}
    for p in (f"blk.{i}" for i in range(n_layer)):
        shapes = {"q": n_embd, "k": n_head_kv * head_dim, "v": n_head_kv * head_dim}
        tensors[f"{p}.attn_norm.weight"] = vector(n_embd, 1.0)
        for name, n_out in shapes.items():
            tensors[f"{p}.attn_{name}.weight"] = matrix(n_out, n_embd, 1.5)
            if architecture == "qwen2":
                tensors[f"{p}.attn_{name}.bias"] = vector(n_out, 0.0)
        tensors[f"{p}.attn_output.weight"] = matrix(n_embd, n_embd)
        tensors[f"{p}.ffn_norm.weight"] = vector(n_embd, 1.0)
        tensors[f"{p}.ffn_gate.weight"] = matrix(n_ff, n_embd)
        tensors[f"{p}.ffn_up.weight"] = matrix(n_ff, n_embd)
        tensors[f"{p}.ffn_down.weight"] = matrix(n_embd, n_ff)
    tensors["output_norm.weight"] = vector(n_embd, 1.0)
    if not tied:
        tensors["output.weight"] = matrix(n_vocab, n_embd, 2.0)
    return write_gguf(path, metadata, tensors)


def byte_ids(text: str) -> list[int]:
    """Return the tokens that a tiny model's vocabulary has for a text, without BOS.

    >>> byte_ids("A b")
    [69, 3, 102]
    """
    return [SPACE if byte == 0x20 else FIRST_BYTE + byte for byte in text.encode()]


def vocabulary(n_vocab: int) -> dict[str, Any]:
    """Return the tokenizer's metadata for a vocabulary of that many tokens, at least 260."""
    n_unused = n_vocab - N_VOCAB
    tokens = ["<unk>", "<s>", "</s>", "\u2581"] + [f"<0x{byte:02X}>" for byte in range(256)]
    kinds = [_UNKNOWN, _CONTROL, _CONTROL, _NORMAL] + [_BYTE] * 256
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens + [f"[unused{i}]" for i in range(n_unused)],
        "tokenizer.ggml.scores": np.zeros(n_vocab, np.float32),
        "tokenizer.ggml.token_type": Typed(ValueType.ARRAY, kinds + [_NORMAL] * n_unused, ValueType.INT32),
        "tokenizer.ggml.unknown_token_id": UNK,
        "tokenizer.ggml.bos_token_id": BOS,
        "tokenizer.ggml.eos_token_id": EOS,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
    }
