"""A llama or a Qwen2 in torch, from what enters any of its layers: for rows that go through the target's own layers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from edgedec.errors import UnsupportedModelError
from edgedec_export.training.arithmetic import product_type
from edgedec_export.training.network import Tensor, turned, turns
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.weights.levels import dequantize

ARCHITECTURES = ("llama", "qwen2")
_MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

Cache = list[tuple[Tensor, Tensor]]
"""Of each layer that was passed the keys, rotated to their positions, and the values: [n_head_kv, n, head_dim]."""


@dataclass(frozen=True, slots=True)
class TorchLlama:
    """The weights of a file's layers in torch, dequantized: matrices in `dtype`, norms and biases in float32.

    Attributes:
        parts: The file.
        tensors: By the file's names.
        device: Where they are.
    """

    parts: TargetParts
    tensors: Mapping[str, Tensor]
    device: str = "cpu"

    @classmethod
    def of(cls, parts: TargetParts, dtype: Any = None, device: str = "cpu", first: int = 0) -> "TorchLlama":
        """Return the layers of a file from `first` on; matrices are of the type in which the device trains.

        Raises:
            UnsupportedModelError: The file's architecture is none of ARCHITECTURES.
        """
        if parts.network.architecture not in ARCHITECTURES:
            raise UnsupportedModelError(
                f"{parts.gguf.paths[0]}: the architecture is {parts.network.architecture!r}; rows of a "
                f"target's own layers are trained for {' and '.join(ARCHITECTURES)} only; choose another kind"
            )
        dtype, tensors = dtype or product_type(device), {}
        for name, info in parts.gguf.tensors.items():
            if name.startswith("blk.") and int(name.split(".")[1]) >= first:
                n_rows = info.shape[1] if len(info.shape) == 2 else 1
                data = np.frombuffer(parts.gguf.read_tensor_bytes(name), np.uint8).reshape(n_rows, -1)
                values = torch.from_numpy(dequantize(info.type, data))
                values = values.to(dtype) if len(info.shape) == 2 else values[0].float()
                tensors[name] = values.to(device)
        return cls(parts, tensors, device)

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
        cos_sin = turns(positions, network.head_dim, network.rope_base)
        for i in range(first, network.n_layer):
            w = {name: self.tensors[f"blk.{i}.{name}.weight"] for name in (*_MATRICES, "attn_norm", "ffn_norm")}
            normed = self.norm(x, w["attn_norm"]).to(w["attn_q"].dtype)
            q, k, v = (self._heads(normed, i, name) for name in ("attn_q", "attn_k", "attn_v"))
            if network.switches.rope_interleaved:  # pairs of neighbours become halves of a head, in both alike
                q, k = (each.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for each in (q, k))
            q, k = (turned(each, *cos_sin) for each in (q, k))
            if past:
                k, v = torch.cat([past[i - first][0], k], 1), torch.cat([past[i - first][1], v], 1)
            cache.append((k, v))
            groups = network.n_head // network.n_head_kv
            keys, values = (each.repeat_interleave(groups, 0)[None] for each in (k, v))
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
            sees = torch.ones(n, n, dtype=torch.bool, device=self.device).tril()
            return self.evaluate(x, torch.arange(n, device=self.device), sees, [], first)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """Return x, normed over its last axis and weighted, float32."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.parts.network.rms_epsilon) * weight

    def _heads(self, x: Tensor, layer: int, name: str) -> Tensor:
        product = F.linear(x, self.tensors[f"blk.{layer}.{name}.weight"])
        bias = self.tensors.get(f"blk.{layer}.{name}.bias")
        product = product if bias is None else product + bias
        return product.view(len(x), -1, self.parts.network.head_dim).transpose(0, 1)
