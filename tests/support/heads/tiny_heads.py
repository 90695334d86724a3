"""Tiny random draft heads, written in each dialect, and a slow forward of them in float64.

    weights = write_head(folder, TinyHead())
    logits = oracle_logits(TinyHead(), weights, taps, text, drafted)

The forward is written for one pair after another, from the formulas, so that it shares no code with what it checks.
"""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.models.hf_checkpoints import safetensors_bytes
from support.models.tiny_models import N_VOCAB

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class TinyHead:
    """The kind of a head; the attributes are named as in HeadCard.

    Attributes:
        speculators: Write the dialect of speculators, else SafeAILab's.
        config: Overrides keys of config.json; None removes one.
    """

    speculators: bool = False
    n_embd: int = 32
    n_embd_target: int = 32
    n_ff: int = 64
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 8
    taps: tuple[int, ...] = (2, 3, 5)
    n_vocab_draft: int = 40
    n_vocab_target: int = 264
    norm_before_residual: bool = False
    fc_norm: str = "none"
    feeds_back_normed: bool = False
    norms_output: bool = True
    own_embedding: bool = False
    own_output: bool = False
    seed: int = 0
    config: dict[str, Any] = field(default_factory=dict)


OF_FLOATS = TinyHead(
    n_embd=48, n_embd_target=48, n_ff=80, n_head=3, n_head_kv=1, head_dim=16, taps=(2, 3, 4), n_vocab_target=N_VOCAB
)
"""A head for the tiny model FLOATS of loaded_blocks."""


KINDS = {
    "plain": TinyHead(),
    "speculators": TinyHead(speculators=True),
    "normed residual": TinyHead(speculators=True, norm_before_residual=True),
    "joined norm": TinyHead(fc_norm="joined"),
    "norm of each tap": TinyHead(fc_norm="each"),
    "3.1": TinyHead(speculators=True, fc_norm="joined", feeds_back_normed=True),
    "unnormed output": TinyHead(norms_output=False, own_output=True),
    "own matrices": TinyHead(own_embedding=True, own_output=True),
    "other sizes": TinyHead(n_embd=24, n_embd_target=32, n_head=2, head_dim=16, own_embedding=True, own_output=True),
    "one tap": TinyHead(taps=(4,)),
    "five taps": TinyHead(taps=(2, 3, 4, 5, 6)),
}
"""Heads that differ in one of the settings each, by name."""


def head_weights(tiny: TinyHead) -> dict[str, F32]:
    """Return random weights by the names of a Head's tensors, and d2t as float32 of the target's ids."""
    rng = np.random.default_rng(tiny.seed)
    n, n_q, n_kv = tiny.n_embd, tiny.n_head * tiny.head_dim, tiny.n_head_kv * tiny.head_dim
    n_taps = len(tiny.taps) * tiny.n_embd_target
    shapes: dict[str, tuple[int, ...]] = {
        "fc": (n, n_taps),
        "q": (n_q, 2 * n),
        "k": (n_kv, 2 * n),
        "v": (n_kv, 2 * n),
        "o": (n, n_q),
        "gate": (tiny.n_ff, n),
        "up": (tiny.n_ff, n),
        "down": (n, tiny.n_ff),
        "input_norm": (n,),
        "hidden_norm": (n,),
        "post_attention_norm": (n,),
        "output_norm": (n,),
    }
    if tiny.fc_norm != "none":
        shapes["fc_norm"] = (n_taps,)
    if tiny.own_embedding:
        shapes["embedding"] = (tiny.n_vocab_target, n)
    if tiny.own_output:
        shapes["output"] = (tiny.n_vocab_draft, n)
    weights: dict[str, F32] = {}
    for name, shape in shapes.items():
        scale = 0.3 if len(shape) == 1 else 1 / math.sqrt(shape[-1])
        weights[name] = (rng.standard_normal(shape) * scale + (len(shape) == 1)).astype(np.float32)
    if not tiny.norms_output and not tiny.feeds_back_normed:
        del weights["output_norm"]
    ids = np.sort(rng.choice(tiny.n_vocab_target, tiny.n_vocab_draft, replace=False))
    return weights | {"d2t": ids.astype(np.float32)}


def write_head(folder: Path, tiny: TinyHead) -> dict[str, F32]:
    """Write a head's folder and return its weights."""
    weights = head_weights(tiny)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(head_config(tiny)))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(stored_tensors(tiny, weights)))
    return weights


def head_config(tiny: TinyHead) -> dict[str, Any]:
    """Return what config.json says of a head."""
    layer = {
        "model_type": "llama",
        "hidden_size": tiny.n_embd,
        "intermediate_size": tiny.n_ff,
        "num_attention_heads": tiny.n_head,
        "num_key_value_heads": tiny.n_head_kv,
        "head_dim": tiny.head_dim,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "hidden_act": "silu",
        "vocab_size": tiny.n_vocab_target,
    }
    outer: dict[str, Any] = {
        "draft_vocab_size": tiny.n_vocab_draft,
        "target_hidden_size": tiny.n_embd_target,
        "norm_before_residual": tiny.norm_before_residual,
        "norm_before_fc": tiny.fc_norm == "joined",
        "fc_norm": tiny.fc_norm == "each",
        "eagle_aux_hidden_state_layer_ids": list(tiny.taps),
        "tie_word_embeddings": True,
    }
    if tiny.speculators:
        outer |= {"speculators_model_type": "eagle3", "norm_output": tiny.feeds_back_normed}
        outer["speculators_config"] = {"algorithm": "eagle3", "verifier": {"name_or_path": "tiny/target"}}
        config = outer | {"architectures": ["Eagle3Speculator"], "transformer_layer_config": layer}
    else:
        config = outer | layer | {"architectures": ["LlamaForCausalLMEagle3"]}
        if not tiny.norms_output:
            config["norm_output"] = False
    config |= tiny.config
    return {key: value for key, value in config.items() if value is not None}


def stored_tensors(tiny: TinyHead, weights: dict[str, F32]) -> dict[str, Any]:
    """Return name to (dtype, shape, bytes) as a checkpoint of the dialect stores them."""
    prefix = "layers.0." if tiny.speculators else "midlayer."
    names = {"fc": "fc.weight", "output_norm": "norm.weight", "output": "lm_head.weight"}
    names |= {"embedding": "embed_tokens.weight", "fc_norm": "input_norm.weight"}
    names |= {x: f"{prefix}self_attn.{x}_proj.weight" for x in "qkvo"}
    names |= {x: f"{prefix}mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
    names |= {"input_norm": f"{prefix}input_layernorm.weight", "hidden_norm": f"{prefix}hidden_norm.weight"}
    names["post_attention_norm"] = f"{prefix}post_attention_layernorm.weight"
    stored = {
        names[name]: ("F32", list(values.shape), values.tobytes()) for name, values in weights.items() if name != "d2t"
    }
    if tiny.fc_norm == "each":
        whole = weights["fc_norm"].reshape(len(tiny.taps), -1)
        del stored["input_norm.weight"]
        stored |= {f"fc_norm.{i}.weight": ("F32", [len(row)], row.tobytes()) for i, row in enumerate(whole)}
    ids = weights["d2t"].astype(np.int64)
    marked = np.zeros(tiny.n_vocab_target, np.bool_)
    marked[ids] = True
    stored["d2t"] = ("I64", [len(ids)], (ids - np.arange(len(ids))).tobytes())
    stored["t2d"] = ("BOOL", [len(marked)], marked.tobytes())
    return stored


def oracle_logits(
    tiny: TinyHead, weights: dict[str, F32], borrowed: F32, taps: F32, text: list[int], drafted: list[int]
) -> F64:
    """Return float64[len(drafted) + 1, n_vocab_draft]: the logits after a text, and after each drafted token.

    Args:
        borrowed: float32[n_vocab_target, n_embd], the target's embedding and output matrix.
        taps: float32[len(text) - 1, n_taps * n_embd_target].
        drafted: The tokens to go on with, as the target's ids.
    """
    w = {name: values.astype(np.float64) for name, values in weights.items()}
    embedding = w.get("embedding", borrowed.astype(np.float64))
    output = w.get("output", borrowed.astype(np.float64)[weights["d2t"].astype(int)])
    keys: list[F64] = []
    values: list[F64] = []
    rows = []
    state: F64 = np.zeros(0)
    for t, token in enumerate([*text[1:], *drafted]):
        feature = _feature(tiny, w, taps[t].astype(np.float64)) if t < len(taps) else _fed_back(tiny, w, state)
        state = _pair(tiny, w, embedding[token], feature, keys, values)
        if t >= len(taps) - 1:
            rows.append(output @ (_norm(state, w["output_norm"]) if tiny.norms_output else state))
    return np.stack(rows)


def _feature(tiny: TinyHead, w: dict[str, F64], taps: F64) -> F64:
    if tiny.fc_norm == "joined":
        taps = _norm(taps, w["fc_norm"])
    if tiny.fc_norm == "each":
        parts, norms = np.split(taps, len(tiny.taps)), np.split(w["fc_norm"], len(tiny.taps))
        taps = np.concatenate([_norm(part, norm) for part, norm in zip(parts, norms, strict=True)])
    feature: F64 = w["fc"] @ taps
    return feature


def _fed_back(tiny: TinyHead, w: dict[str, F64], state: F64) -> F64:
    return _norm(state, w["output_norm"]) if tiny.feeds_back_normed else state


def _pair(tiny: TinyHead, w: dict[str, F64], embedded: F64, feature: F64, keys: list[F64], values: list[F64]) -> F64:
    """Return the layer's output for the next pair, whose key and value are appended."""
    normed = _norm(feature, w["hidden_norm"])
    pair = np.concatenate([_norm(embedded, w["input_norm"]), normed])
    position = len(keys)
    keys.append(np.stack([_rope(k, position) for k in (w["k"] @ pair).reshape(tiny.n_head_kv, -1)]))
    values.append((w["v"] @ pair).reshape(tiny.n_head_kv, -1))
    heads = []
    for i, query in enumerate((w["q"] @ pair).reshape(tiny.n_head, -1)):
        j = i * tiny.n_head_kv // tiny.n_head
        scores = np.array([_rope(query, position) @ key[j] for key in keys]) / math.sqrt(tiny.head_dim)
        p = np.exp(scores - scores.max())
        heads.append(sum(p[m] * values[m][j] for m in range(len(values))) / p.sum())
    hidden = (normed if tiny.norm_before_residual else feature) + w["o"] @ np.concatenate(heads)
    m = _norm(hidden, w["post_attention_norm"])
    gate = w["gate"] @ m
    out: F64 = hidden + w["down"] @ (gate / (1 + np.exp(-gate)) * (w["up"] @ m))
    return out


def _norm(x: F64, weight: F64) -> F64:
    out: F64 = x / np.sqrt(np.mean(x * x) + 1e-5) * weight
    return out


def _rope(x: F64, position: int) -> F64:
    half = len(x) // 2
    turned = (x[:half] + 1j * x[half:]) * np.exp(1j * position * 5000.0 ** (-np.arange(half) / half))
    return np.concatenate([turned.real, turned.imag])
