"""A llama in torch, from what enters any of its layers: for drafting rows that go through the target's own layers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec.errors import UnsupportedModelError
from edgedec_export.training.arithmetic import product_type
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Tensor
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.weights.levels import dequantize

_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

Cache = list[tuple[Tensor, Tensor]]
"""Of each layer that was passed the keys, rotated to their positions, and the values: [n_head_kv, n, head_dim]."""


@dataclass(frozen=True, slots=True)
class TorchLlama:
    """A llama's weights in torch, dequantized: matrices in `dtype`, norms in float32.

    Attributes:
        parts: The file.
        tensors: By the file's names.
        output: [n_vocab, n_embd], the output matrix.
    """

    parts: TargetParts
    tensors: Mapping[str, Tensor]
    output: Tensor

    @classmethod
    def of(cls, parts: TargetParts, dtype: Any = None) -> "TorchLlama":
        """Return the model of a file; its matrices are of the type in which processors like this one train.

        Raises:
            UnsupportedModelError: The file's architecture is not llama.
        """
        if parts.network.architecture != "llama":
            raise UnsupportedModelError(
                f"{parts.gguf.paths[0]}: the architecture is {parts.network.architecture!r}; rows that draft in the "
                "target's layers are measured for 'llama' only"
            )
        dtype = dtype or product_type("cpu")
        tensors = {}
        for name, info in parts.gguf.tensors.items():
            if name.startswith("blk."):
                n_rows = info.shape[1] if len(info.shape) == 2 else 1
                data = np.frombuffer(parts.gguf.read_tensor_bytes(name), np.uint8).reshape(n_rows, -1)
                values = torch.from_numpy(dequantize(info.type, data))
                tensors[name] = values.to(dtype) if len(info.shape) == 2 else values[0].float()
        output = torch.from_numpy(parts.output_rows(np.arange(parts.network.n_vocab))).to(dtype)
        return cls(parts, tensors, output)

    def evaluate(self, x: Tensor, positions: Tensor, sees: Tensor, past: Cache, first: int = 0) -> tuple[Tensor, Cache]:
        """Return float32[n, n_embd], what leaves the last layer, and the cache with these rows at its end.

        Args:
            x: float32[n, n_embd], what enters layer `first`: embeddings, where that is 0.
            positions: int64[n].
            sees: bool[n, n_past + n], which cached rows, and which of these, each row sees.
            past: The cache of the layers from `first` on; a list of no layers where it is empty.
            first: The first layer to pass.
        """
        network, cache = self.parts.network, []
        turns = _turns(positions, network.head_dim, network.rope_base)
        for i in range(first, network.n_layer):
            w = {name: self.tensors[f"blk.{i}.{name}.weight"] for name in (*_MATRICES, "attn_norm", "ffn_norm")}
            normed = self.norm(x, w["attn_norm"]).to(w["attn_q"].dtype)
            q, k, v = (self._heads(normed, w[name]) for name in ("attn_q", "attn_k", "attn_v"))
            q, k = (_rotate(found, turns, interleaved=network.switches.rope_interleaved) for found in (q, k))
            if past:
                k, v = torch.cat([past[i - first][0], k], 1), torch.cat([past[i - first][1], v], 1)
            cache.append((k, v))
            groups = network.n_head // network.n_head_kv
            keys, values = (kept.repeat_interleave(groups, 0)[None] for kept in (k, v))
            mixed = F.scaled_dot_product_attention(q[None], keys, values, attn_mask=sees)[0]
            x = x + F.linear(mixed.transpose(0, 1).flatten(1), w["attn_output"])
            normed = self.norm(x, w["ffn_norm"]).to(w["ffn_gate"].dtype)
            inner = F.silu(F.linear(normed, w["ffn_gate"])) * F.linear(normed, w["ffn_up"])
            x = x + F.linear(inner, w["ffn_down"])
        return x, cache

    def read(self, x: Tensor, first: int = 0) -> tuple[Tensor, Cache]:
        """Return what evaluate() returns for a text from its beginning; nothing of it has a gradient."""
        n = len(x)
        with torch.no_grad():
            return self.evaluate(x, torch.arange(n), torch.ones(n, n, dtype=torch.bool).tril(), [], first)

    def embeddings(self, token_ids: NDArray[np.int32]) -> Tensor:
        """Return float32[n, n_embd], what enters layer 0."""
        return torch.from_numpy(self.parts.embeddings(token_ids))

    def outputs(self, x: Tensor) -> Tensor:
        """Return float32[n, n_embd], what the output matrix turns into logits."""
        return self.norm(x, torch.from_numpy(self.parts.output_norm))

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x, normed over its last axis and weighted, float32."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.parts.network.rms_epsilon) * weight

    def _heads(self, x: Tensor, matrix: Tensor) -> Tensor:
        return F.linear(x, matrix).view(len(x), -1, self.parts.network.head_dim).transpose(0, 1)


def _turns(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    speeds = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    angles = positions[:, None] * speeds
    return angles.cos().float(), angles.sin().float()


def _rotate(x: Tensor, turns: tuple[Tensor, Tensor], *, interleaved: bool) -> Tensor:
    """Return [n_head, n, head_dim] turned: neighbours of a head with each other, or its two halves."""
    cos, sin = turns
    wide = x.float()
    a, b = (wide[..., 0::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    turned = a * cos - b * sin, b * cos + a * sin
    return (torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)).to(x.dtype)


def agreement(llama: TorchLlama, lessons: Sequence[Lesson]) -> float:
    """Return the share of the answers' places where this model's most probable token is the one in the lessons."""
    n_same = n_all = 0
    with torch.no_grad():
        for lesson in lessons:
            x, _ = llama.read(llama.embeddings(lesson.token_ids[:-1]))
            rows = llama.outputs(x[lesson.n_prompt - 1 :]).to(llama.output.dtype)
            best = F.linear(rows, llama.output).argmax(-1).numpy()
            n_same, n_all = n_same + int((best == lesson.best).sum()), n_all + lesson.n_answer
    return n_same / n_all
