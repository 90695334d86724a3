"""Tiny random assistants of gemma4, as files beside tiny models, and what they score in float64.

path = write_assistant(folder / "h.gguf", OF_FLOATS)
rows = AssistantTruth.of(model, path, FLOATS, OF_FLOATS).scores(text, drafted)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edgedec.gguf.file import read_gguf
from edgedec.gguf.tensor_types import GGMLType
from support.models.gemma4_truth import F64, Truth, tensors_of
from support.models.gguf_writer import RawTensor, write_gguf
from support.models.random_blocks import random_blocks
from support.models.tiny_quantized import Tiny, tiny_metadata, tiny_tensors

FLOATS = Tiny(
    "gemma4", n_layer=6, n_embd=80, n_head_kv=1, head_dim=32, narrow=16, n_ff=80, n_shared=3, n_per_layer=32, tied=True
)
OF_FLOATS = Tiny(
    "gemma4", n_layer=4, n_embd=48, n_head_kv=1, head_dim=32, narrow=16, n_ff=80, whole=4, tied=True, seed=7
)
"""An assistant for it, whose layers are three with a window and one without."""
INTEGERS = Tiny("gemma4", n_layer=6, head_dim=128, narrow=64, n_shared=3, tied=True, types=("Q8_0",))
OF_INTEGERS = replace(INTEGERS, n_layer=4, n_embd=128, n_ff=128, n_shared=0, whole=4, seed=7)
Parts = tuple[dict[str, Any], dict[str, RawTensor]]
"""Metadata and tensors."""


def assistant(tiny: Tiny, n_embd: int) -> Parts:
    """Return what the file of an assistant has for a target whose states have n_embd numbers."""
    keys = {key.replace("gemma4.", "gemma4-assistant."): value for key, value in tiny_metadata(tiny).items()}
    of_layers = dict.fromkeys(("attention.shared_kv_layers", "nextn_predict_layers"), tiny.n_layer)
    keys |= {f"gemma4-assistant.{key}": value for key, value in of_layers.items()}
    keys |= {"general.architecture": "gemma4-assistant", "gemma4-assistant.embedding_length_out": n_embd}
    unread = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
    tensors = {name: tensor for name, tensor in tiny_tensors(tiny).items() if not name.endswith(unread)}
    rng, shapes = np.random.default_rng(tiny.seed), {"pre": (tiny.n_embd, 2 * n_embd), "post": (n_embd, tiny.n_embd)}
    for name, (n_out, n_in) in shapes.items():
        data = random_blocks(tiny.types[0], n_out, n_in, rng, n_in**-0.5)
        tensors[f"nextn.{name}_projection.weight"] = RawTensor(GGMLType[tiny.types[0]], (n_in, n_out), data)
    return keys, tensors


def write_assistant(path: Path, tiny: Tiny = OF_FLOATS, n_embd: int = FLOATS.n_embd) -> Path:
    """Write an assistant and return its path."""
    return write_gguf(path, *assistant(tiny, n_embd))


@dataclass(slots=True)
class AssistantTruth(Truth):
    """An assistant of F32 in float64, whose layers see the keys and values of a target of F32."""

    target: Truth | None = None

    @classmethod
    def of(cls, model: Path, head: Path, tiny: Tiny, of_head: Tiny) -> "AssistantTruth":
        """Return the assistant of two files, which has read nothing."""
        made = cls(*_numbers(head, of_head))
        made.target = Truth(*_numbers(model, tiny))
        return made

    def scores(self, text: Sequence[int], drafted: Sequence[int]) -> F64:
        """Return f64[len(drafted) + 1, n_vocab], the scores of what follows a text, and each drafted token."""
        assert self.target is not None
        *before, newest = text
        rows, state = list[F64](), np.zeros(0)
        for position, token in enumerate(before):
            state = self.target.state(position, token)
        embeddings, w = self.target.tensors["token_embd.weight"], self.tensors
        for token in (newest, *drafted):
            embedding = embeddings[token] * math.sqrt(embeddings.shape[1])
            x = w["nextn.pre_projection.weight"] @ np.concatenate([embedding, state])
            for i in range(len(self.sliding)):
                x = self._layer(i, len(before), x, np.zeros(0))
            normed = self._rms(x, "output_norm.weight")
            rows.append(w["token_embd.weight"] @ normed)
            state = w["nextn.post_projection.weight"] @ normed
        return np.stack(rows)

    def _attention(self, i: int, position: int, h: F64) -> F64:
        assert self.target is not None
        w, p, of = self.tensors, f"blk.{i}.attn_", self.target
        d = len(w[p + "q_norm.weight"])
        q = self._turned(i, position, self._rms((w[p + "q.weight"] @ h).reshape(-1, d), p + "q_norm.weight"))
        source = max(j for j in range(of.n_own) if of.sliding[j] == self.sliding[i])
        return self._seen(i, position, q, of.keys[source], of.values[source])


def _numbers(path: Path, tiny: Tiny) -> tuple[Any, ...]:
    """Return the first fields of Truth for the file of a tiny model."""
    sliding = tuple(tiny.slides(i) for i in range(tiny.n_layer))
    numbers = (tiny.sliding_window, tiny.n_layer - tiny.n_shared, tiny.n_expert_used, 1e-5)
    return tensors_of(read_gguf(path)), tiny.n_head, sliding, *numbers
