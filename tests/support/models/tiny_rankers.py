"""Random tiny models that rank or embed: BERT with a head, ModernBERT, EmbeddingGemma, Qwen3; and llama.cpp's scores.

path = tiny_cross_encoder(tmp_path / "bert.gguf")
scores = llama_scores(path, [ids])
"""

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.models.gguf_writer import write_gguf
from support.models.tiny_bert import TinyBert
from support.models.vocabularies import CONTROL, NORMAL, USER_DEFINED, letters, types

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
_gelu_erf = np.vectorize(erf)

RERANK = (
    "<|im_start|>system\nJudge.<|im_end|>\n<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_SPECIAL = {
    "<|endoftext|>": CONTROL,
    "<|im_start|>": CONTROL,
    "<|im_end|>": CONTROL,
    "<think>": USER_DEFINED,
    "</think>": USER_DEFINED,
}
_MERGES = ("y e", "ye s", "n o", "\u0120 t", "\u0120t h", "\u0120th e")
_TOKENS = [*letters(), *(merge.replace(" ", "") for merge in _MERGES), *_SPECIAL]
YES, NO, IM_START, IM_END = (_TOKENS.index(token) for token in ("yes", "no", "<|im_start|>", "<|im_end|>"))


def _drawn(rng: np.random.Generator, n_embd: int, gain: float = 1.5) -> tuple[Callable[..., F32], Callable[..., F32]]:
    """Return what draws a matrix of n_out rows, and the weights of a norm."""

    def matrix(n_out: int, n_in: int, gain: float = gain) -> F32:
        return np.asarray(gain / n_in**0.5 * rng.standard_normal((n_out, n_in)), np.float32)

    return matrix, lambda n=n_embd: np.asarray(1 + 0.1 * rng.standard_normal(n), np.float32)


def word_vocabulary(pre: str = "qwen2") -> dict[str, Any]:
    """Return the metadata of a byte-level vocabulary with the words yes, no and " the"."""
    n_normal = len(_TOKENS) - len(_SPECIAL)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": _TOKENS,
        "tokenizer.ggml.token_type": types([NORMAL] * n_normal + list(_SPECIAL.values())),
        "tokenizer.ggml.merges": list(_MERGES),
        "tokenizer.ggml.eos_token_id": n_normal,
        "tokenizer.ggml.bos_token_id": n_normal,
        "tokenizer.ggml.add_bos_token": False,
    }


def tiny_cross_encoder(
    path: Path, *, seed: int = 0, dense: bool = True, n_out: int = 1, more: Mapping[str, Any] | None = None
) -> Path:
    """Write a BERT with a head that reads the first token's state, `dense` with the layer before its last one."""
    bert = TinyBert(seed=seed)
    tensors = head_tensors(bert.n_embd, seed, dense=dense, n_out=n_out)
    return bert.write_gguf(path, pooling_type=4, more=more, tensors=tensors)


def head_tensors(n_embd: int, seed: int, *, dense: bool = True, n_out: int = 1) -> dict[str, F32]:
    """Return random tensors of a head by their names in a GGUF."""
    rng = np.random.default_rng(1000 + seed)
    found = {
        "cls.output.weight": (3 / n_embd**0.5 * rng.standard_normal((n_out, n_embd))).astype(np.float32),
        "cls.output.bias": rng.standard_normal(n_out).astype(np.float32),
    }
    if dense:
        found["cls.weight"] = (1.5 / n_embd**0.5 * rng.standard_normal((n_embd, n_embd))).astype(np.float32)
        found["cls.bias"] = (0.1 * rng.standard_normal(n_embd)).astype(np.float32)
    return found


def tiny_modern_bert(
    path: Path, *, seed: int = 0, pooling_type: int = 4, by_mean: bool = True, n_embd: int = 64, n_layer: int = 3
) -> Path:
    """Write a ModernBERT, whose layers but the first see a window of tokens, with a head where `pooling_type` is 4."""
    rng = np.random.default_rng(seed)
    n_ff, arch = 96, "modern-bert"
    matrix, norm = _drawn(rng, n_embd)
    n_vocab = len(_TOKENS)
    metadata = word_vocabulary("gpt-2") | {
        "general.architecture": arch,
        "general.name": f"tiny modern-bert {seed}",
        f"{arch}.block_count": n_layer,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": 4,
        f"{arch}.attention.layer_norm_epsilon": 1e-5,
        f"{arch}.attention.causal": False,
        f"{arch}.attention.sliding_window": 16,
        f"{arch}.rope.freq_base": 160000.0,
        f"{arch}.rope.freq_base_swa": 10000.0,
        f"{arch}.vocab_size": n_vocab,
        f"{arch}.pooling_type": pooling_type,
        f"{arch}.classifier.pooling_type": 1 if by_mean else 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": True,
        "tokenizer.ggml.add_sep_token": False,
    }
    tensors = {
        "token_embd.weight": matrix(n_vocab, n_embd, 8.0),
        "token_embd_norm.weight": norm(),
        "output_norm.weight": norm(),
    }
    for i in range(n_layer):
        p = f"blk.{i}"
        if i:
            tensors[f"{p}.attn_norm.weight"] = norm()
        tensors[f"{p}.attn_qkv.weight"] = matrix(3 * n_embd, n_embd)
        tensors[f"{p}.attn_output.weight"] = matrix(n_embd, n_embd)
        tensors[f"{p}.ffn_norm.weight"] = norm()
        tensors[f"{p}.ffn_up.weight"] = matrix(2 * n_ff, n_embd)
        tensors[f"{p}.ffn_down.weight"] = matrix(n_embd, n_ff)
    if pooling_type == 4:
        head = head_tensors(n_embd, seed)
        tensors |= {name: head[name] for name in ("cls.weight", "cls.output.weight", "cls.output.bias")}
        tensors["cls.norm.weight"] = norm()
    return write_gguf(path, metadata, tensors)


def tiny_embedding_gemma(path: Path, *, seed: int = 0, dense: tuple[int, int] | None = (64, 96)) -> Path:
    """Write an EmbeddingGemma that pools by the mean; `dense` are the widths of the first layer behind that."""
    rng = np.random.default_rng(seed)
    n_embd, n_ff, n_layer, n_head, head_dim, arch = 64, 96, 2, 4, 16, "gemma-embedding"
    matrix, norm = _drawn(rng, n_embd)
    metadata = word_vocabulary("gpt-2") | {
        "general.architecture": arch,
        "general.name": f"tiny embedding gemma {seed}",
        f"{arch}.block_count": n_layer,
        f"{arch}.context_length": 128,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_head,
        f"{arch}.attention.head_count_kv": 1,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.attention.sliding_window": 16,
        f"{arch}.attention.sliding_window_pattern": 2,
        f"{arch}.rope.freq_base": 1000000.0,
        f"{arch}.pooling_type": 1,
    }
    tensors = {"token_embd.weight": matrix(len(_TOKENS), n_embd), "output_norm.weight": norm()}
    for i in range(n_layer):
        p = f"blk.{i}"
        for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
            tensors[f"{p}.{name}.weight"] = norm()
        tensors |= {f"{p}.attn_q_norm.weight": norm(head_dim), f"{p}.attn_k_norm.weight": norm(head_dim)}
        tensors[f"{p}.attn_q.weight"] = matrix(n_head * head_dim, n_embd)
        tensors[f"{p}.attn_k.weight"] = matrix(head_dim, n_embd)
        tensors[f"{p}.attn_v.weight"] = matrix(head_dim, n_embd)
        tensors[f"{p}.attn_output.weight"] = matrix(n_embd, n_head * head_dim)
        tensors[f"{p}.ffn_gate.weight"] = matrix(n_ff, n_embd)
        tensors[f"{p}.ffn_up.weight"] = matrix(n_ff, n_embd)
        tensors[f"{p}.ffn_down.weight"] = matrix(n_embd, n_ff)
    if dense is not None:
        n_in, n_mid = dense
        metadata |= {f"{arch}.dense_2_feat_in": n_in, f"{arch}.dense_2_feat_out": n_mid}
        metadata |= {f"{arch}.dense_3_feat_in": n_mid, f"{arch}.dense_3_feat_out": n_in}
        tensors |= {"dense_2.weight": matrix(n_mid, n_in), "dense_3.weight": matrix(n_in, n_mid)}
    return write_gguf(path, metadata, tensors)


def tiny_qwen3_ranker(
    path: Path,
    *,
    seed: int = 0,
    head: bool = True,
    tied: bool = True,
    n_ctx: int = 512,
    answers: Sequence[int] = (YES, NO),
    more: Mapping[str, Any] | None = None,
) -> Path:
    """Write a Qwen3 that is asked for yes or no.

    Args:
        path: The file.
        seed: Of its weights.
        head: Whether it has the head and the keys of llama.cpp's converter.
        tied: Whether the embedding is the output matrix. Where it is not and there is a head, the output matrix is left
            out, as that converter does.
        n_ctx: The context it says it was trained for.
        answers: The tokens whose rows of the output matrix the head has.
        more: Further metadata; None takes a key away.
    """
    rng = np.random.default_rng(seed)
    n_embd, n_head, n_kv, head_dim, n_ff, n_layer, arch = 64, 4, 2, 16, 128, 2, "qwen3"
    matrix, norm = _drawn(rng, n_embd, 1.0)
    metadata = word_vocabulary() | {
        "general.architecture": arch,
        "general.name": f"tiny qwen3 ranker {seed}",
        f"{arch}.context_length": n_ctx,
        f"{arch}.embedding_length": n_embd,
        f"{arch}.block_count": n_layer,
        f"{arch}.feed_forward_length": n_ff,
        f"{arch}.attention.head_count": n_head,
        f"{arch}.attention.head_count_kv": n_kv,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{arch}.rope.freq_base": 1000000.0,
    }
    tensors = {"token_embd.weight": matrix(len(_TOKENS), n_embd, 2.0), "output_norm.weight": norm()}
    for i in range(n_layer):
        p = f"blk.{i}"
        tensors |= {f"{p}.attn_norm.weight": norm(), f"{p}.ffn_norm.weight": norm()}
        tensors |= {f"{p}.attn_q_norm.weight": norm(head_dim), f"{p}.attn_k_norm.weight": norm(head_dim)}
        tensors[f"{p}.attn_q.weight"] = matrix(n_head * head_dim, n_embd, 1.5)
        tensors[f"{p}.attn_k.weight"] = matrix(n_kv * head_dim, n_embd, 1.5)
        tensors[f"{p}.attn_v.weight"] = matrix(n_kv * head_dim, n_embd, 1.5)
        tensors[f"{p}.attn_output.weight"] = matrix(n_embd, n_head * head_dim)
        tensors[f"{p}.ffn_gate.weight"] = matrix(n_ff, n_embd)
        tensors[f"{p}.ffn_up.weight"] = matrix(n_ff, n_embd)
        tensors[f"{p}.ffn_down.weight"] = matrix(n_embd, n_ff)
    output = tensors["token_embd.weight"] if tied else matrix(len(_TOKENS), n_embd, 2.0)
    if head:
        tensors["cls.output.weight"] = np.stack([output[i] for i in answers])
        metadata |= {f"{arch}.pooling_type": 4, f"{arch}.classifier.output_labels": ["yes", "no"]}
        metadata["tokenizer.chat_template.rerank"] = RERANK
    elif not tied:
        tensors["output.weight"] = output
    metadata |= more or {}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, tensors)


def modern_states(tensors: Mapping[str, F32], ids: Sequence[int], n_head: int = 4, window: int = 16) -> F64:
    """Return float64[n, n_embd], the states of a text after ModernBERT's last norm (Warner et al. 2024)."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    n, n_embd = len(ids), w["output_norm.weight"].shape[0]
    half = n_embd // n_head // 2

    def norm(x: F64, weight: F64) -> F64:
        centred = x - x.mean(axis=-1, keepdims=True)
        return np.asarray(centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-5) * weight)

    def turned(x: F64, base: float) -> F64:
        angles = np.arange(n)[:, None] * base ** (-np.arange(half) / half)
        c, s = np.cos(angles), np.sin(angles)
        a, b = x[..., :half], x[..., half:]
        return np.concatenate([a * c - b * s, b * c + a * s], axis=-1)

    distance = np.abs(np.arange(n)[:, None] - np.arange(n))
    x = norm(w["token_embd.weight"][list(ids)], w["token_embd_norm.weight"])
    n_layer = sum(name.endswith("ffn_down.weight") for name in w)
    for i in range(n_layer):
        p, is_whole = f"blk.{i}.", i % 3 == 0
        inner = norm(x, w[f"{p}attn_norm.weight"]) if f"{p}attn_norm.weight" in w else x
        parts = (inner @ w[f"{p}attn_qkv.weight"].T).reshape(n, 3, n_head, -1).transpose(1, 2, 0, 3)
        base = 160000.0 if is_whole else 10000.0
        scores = turned(parts[0], base) @ turned(parts[1], base).swapaxes(1, 2) / np.sqrt(2 * half)
        if not is_whole:
            scores = np.where(distance > window // 2, -np.inf, scores)
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        mixed = (shares / shares.sum(axis=-1, keepdims=True) @ parts[2]).swapaxes(0, 1).reshape(n, -1)
        x = x + mixed @ w[f"{p}attn_output.weight"].T
        up, gate = np.split(norm(x, w[f"{p}ffn_norm.weight"]) @ w[f"{p}ffn_up.weight"].T, 2, axis=-1)
        x = x + (up * 0.5 * (1 + _gelu_erf(up / np.sqrt(2))) * gate) @ w[f"{p}ffn_down.weight"].T
    return norm(x, w["output_norm.weight"])


def llama_scores(path: Path, texts: Sequence[Sequence[int]], n_out: int = 1, rows: Sequence[F32] | None = None) -> F64:
    """Return float64[n_texts, n_out], what llama.cpp's own pooling for ranking makes of texts.

    `rows`, f32[n_tokens, n_embd] for each text, stand in place of the embeddings of its tokens where they are given.
    """
    import llama_cpp as api

    model = api.llama_model_load_from_file(os.fsencode(path), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = 1
    params.embeddings, params.pooling_type = True, api.LLAMA_POOLING_TYPE_RANK
    context = api.llama_init_from_model(model, params)
    found = []
    try:
        for number, ids in enumerate(texts):
            api.llama_memory_clear(memory, True) if (memory := api.llama_get_memory(context)) else None
            batch = api.llama_batch_init(len(ids), 0, 1)
            for i, token_id in enumerate(ids):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token_id, i, 1
                batch.seq_id[i][0], batch.logits[i] = 0, 1
            batch.n_tokens = len(ids)
            tokens = batch.token
            if rows is not None:
                batch.token = None
                batch.embd = np.ascontiguousarray(rows[number]).ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            assert api.llama_decode(context, batch) == 0
            batch.token, batch.embd = tokens, None
            pointer = api.llama_get_embeddings_seq(context, 0)
            found.append([pointer[i] for i in range(n_out)])
            api.llama_batch_free(batch)
    finally:
        api.llama_free(context)
        api.llama_model_free(model)
    return np.array(found, np.float64)
