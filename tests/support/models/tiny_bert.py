"""Random tiny BERTs as GGUFs and as checkpoints of sentence-transformers, and their forward in float64.

    bert = TinyBert(seed=1)
    path = bert.write_gguf(tmp_path / "bert.gguf", pooling_type=1)
    vector = pooled(bert_states(bert.weights(), tiny_ids("a text")), "mean")

The vocabulary has the five special tokens and the letters, at the beginning of a word and within one.
"""

import json
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import erf
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.models.gguf_writer import write_gguf
from support.models.hf_checkpoints import safetensors_bytes

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
UNK, CLS, SEP = 1, 2, 3
WORDPIECES = (*SPECIAL, *string.ascii_lowercase, *(f"##{letter}" for letter in string.ascii_lowercase))
_GGUF_NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}
_gelu_erf = np.vectorize(erf)


@dataclass(frozen=True, slots=True)
class TinyBert:
    """The sizes of a model."""

    n_layer: int = 2
    n_embd: int = 64
    n_head: int = 4
    n_ff: int = 96
    n_ctx: int = 128
    seed: int = 0

    def weights(self) -> dict[str, F32]:
        """Return random weights by their names in a checkpoint."""
        rng = np.random.default_rng(self.seed)
        e, f = self.n_embd, self.n_ff

        def matrix(n_out: int, n_in: int, gain: float = 1.5) -> F32:
            values: F32 = (gain / n_in**0.5 * rng.standard_normal((n_out, n_in))).astype(np.float32)
            return values

        def vector(n: int, mean: float = 0.0) -> F32:
            return (mean + 0.1 * rng.standard_normal(n)).astype(np.float32)

        found = {
            "embeddings.word_embeddings.weight": matrix(len(WORDPIECES), e, 8.0),
            "embeddings.position_embeddings.weight": matrix(self.n_ctx, e, 2.0),
            "embeddings.token_type_embeddings.weight": matrix(2, e),
        }
        sizes = {name: (e, e) for name in _GGUF_NAMES if name.startswith("attention") and "Norm" not in name}
        sizes |= {"intermediate.dense": (f, e), "output.dense": (e, f)}
        for i in range(self.n_layer):
            for name, (n_out, n_in) in sizes.items():
                found[f"encoder.layer.{i}.{name}.weight"] = matrix(n_out, n_in)
                found[f"encoder.layer.{i}.{name}.bias"] = vector(n_out)
        norms = [
            f"encoder.layer.{i}.{part}.LayerNorm"
            for i in range(self.n_layer)
            for part in ("attention.output", "output")
        ]
        for norm in ("embeddings.LayerNorm", *norms):
            found[f"{norm}.weight"], found[f"{norm}.bias"] = vector(e, 1.0), vector(e)
        return found

    def write_gguf(
        self,
        path: Path,
        *,
        pooling_type: int | None = 1,
        more: Mapping[str, Any] | None = None,
        tensors: Mapping[str, NDArray[Any]] | None = None,
    ) -> Path:
        """Write a GGUF as llama.cpp's converter does and return its path.

        `more` is further metadata, `tensors` are further tensors by their names in the GGUF.
        """
        tokens = [*SPECIAL, *(f"\u2581{letter}" for letter in string.ascii_lowercase), *string.ascii_lowercase]
        metadata: dict[str, Any] = {
            "general.architecture": "bert",
            "general.name": f"tiny bert {self.seed}",
            "bert.block_count": self.n_layer,
            "bert.context_length": self.n_ctx,
            "bert.embedding_length": self.n_embd,
            "bert.feed_forward_length": self.n_ff,
            "bert.attention.head_count": self.n_head,
            "bert.attention.layer_norm_epsilon": 1e-12,
            "bert.attention.causal": False,
            "tokenizer.ggml.model": "bert",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": np.array([3] * len(SPECIAL) + [1] * 52, np.int32),
            "tokenizer.ggml.token_type_count": 2,
            "tokenizer.ggml.unknown_token_id": UNK,
            "tokenizer.ggml.bos_token_id": CLS,
            "tokenizer.ggml.cls_token_id": CLS,
            "tokenizer.ggml.seperator_token_id": SEP,
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.ggml.mask_token_id": 4,
        }
        if pooling_type is not None:
            metadata["bert.pooling_type"] = pooling_type
        own = {_gguf_name(name): tensor for name, tensor in self.weights().items()}
        return write_gguf(path, metadata | dict(more or {}), own | dict(tensors or {}))

    def write_folder(self, folder: Path, pooling: str = "mean_tokens", **config: Any) -> Path:
        """Write a checkpoint with the files of sentence-transformers and return its folder.

        `config` is further keys of config.json.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sizes = {
            "model_type": "bert",
            "hidden_act": "gelu",
            "hidden_size": self.n_embd,
            "intermediate_size": self.n_ff,
            "layer_norm_eps": 1e-12,
            "max_position_embeddings": self.n_ctx,
            "num_attention_heads": self.n_head,
            "num_hidden_layers": self.n_layer,
            "type_vocab_size": 2,
            "vocab_size": len(WORDPIECES),
        }
        (folder / "config.json").write_text(json.dumps(sizes | config))
        kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
        modules = [{"path": path, "type": f"sentence_transformers.models.{kind}"} for path, kind in kinds.items()]
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir(exist_ok=True)
        modes = {f"pooling_mode_{name}": name == pooling for name in ("cls_token", "mean_tokens", "max_tokens")}
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": self.n_embd} | modes))
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json()))
        weights = self.weights() | {"pooler.dense.weight": np.zeros((self.n_embd, self.n_embd), np.float32)}
        raw = {name: ("F32", tensor.shape, tensor.tobytes()) for name, tensor in weights.items()}
        (folder / "model.safetensors").write_bytes(safetensors_bytes(raw))
        return folder


def tokenizer_json() -> dict[str, Any]:
    """Return the tokenizer.json of the tiny vocabulary."""
    return {
        "added_tokens": [{"id": i, "content": token, "special": True} for i, token in enumerate(SPECIAL)],
        "normalizer": {"type": "BertNormalizer", "lowercase": True, "strip_accents": None},
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "model": {"type": "WordPiece", "vocab": {token: i for i, token in enumerate(WORDPIECES)}},
    }


def tiny_ids(text: str) -> list[int]:
    """Return the token ids of a text of small letters and spaces: a token for each letter."""
    pieces = [f"##{letter}" if i else letter for word in text.split() for i, letter in enumerate(word)]
    return [CLS, *map(WORDPIECES.index, pieces), SEP]


def bert_states(
    weights: Mapping[str, NDArray[Any]], ids: Sequence[int], n_head: int = 4, n_first: int | None = None
) -> F64:
    """Return float64[n, n_embd], the states of a text's tokens after the last layer (Devlin et al. 2018).

    The tokens of a pair's second text, behind the `n_first` of its first one, have the second token type.
    """
    w = {name: tensor.astype(np.float64) for name, tensor in weights.items() if not name.startswith("embeddings.word")}
    n = len(ids)

    def norm(x: F64, name: str) -> F64:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled: F64 = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-12)
        return scaled * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: F64, name: str) -> F64:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    x: F64 = weights["embeddings.word_embeddings.weight"][list(ids)].astype(np.float64)
    kinds = [int(n_first is not None and i >= n_first) for i in range(n)]
    x = x + w["embeddings.position_embeddings.weight"][:n] + w["embeddings.token_type_embeddings.weight"][kinds]
    x = norm(x, "embeddings.LayerNorm")
    n_layer = sum(name.endswith("intermediate.dense.weight") for name in weights)
    for p in (f"encoder.layer.{i}." for i in range(n_layer)):
        q, k, v = (
            linear(x, f"{p}attention.self.{part}").reshape(n, n_head, -1).swapaxes(0, 1)
            for part in ("query", "key", "value")
        )
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1])
        shares = np.exp(scores - scores.max(axis=-1, keepdims=True))
        shares /= shares.sum(axis=-1, keepdims=True)
        mixed = (shares @ v).swapaxes(0, 1).reshape(n, -1)
        x = norm(x + linear(mixed, f"{p}attention.output.dense"), f"{p}attention.output.LayerNorm")
        inner = linear(x, f"{p}intermediate.dense")
        inner = inner * 0.5 * (1 + _gelu_erf(inner / np.sqrt(2)))
        x = norm(x + linear(inner, f"{p}output.dense"), f"{p}output.LayerNorm")
    return x


def pooled(states: F64, pooling: str) -> F64:
    """Return float64[n_embd], the vector of length 1 of a text's states."""
    vector: F64 = {"mean": states.mean(axis=0), "cls": states[0], "last": states[-1]}[pooling]
    return vector / np.linalg.norm(vector)


def _gguf_name(name: str) -> str:
    """Return the name in a GGUF of a checkpoint's tensor."""
    stem, _, kind = name.rpartition(".")
    if stem in _GGUF_NAMES:
        return f"{_GGUF_NAMES[stem]}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{_GGUF_NAMES[part]}.{kind}"
