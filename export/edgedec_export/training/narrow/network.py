"""A narrow draft model in torch: a decoder of the architecture llama over a batch of texts."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from edgedec_export.training.narrow.shape import NarrowShape
from edgedec_export.training.network import Tensor, Weights


def states_of(shape: NarrowShape, weights: Weights, embeddings: Tensor) -> Tensor:
    """Return [B, T, n_embd], the states after the last layer and the norm behind it; the rest as in exit_states()."""
    (states,) = exit_states(shape, weights, embeddings, (shape.n_layer,))
    return states


def exit_states(shape: NarrowShape, weights: Weights, embeddings: Tensor, exits: Sequence[int]) -> list[Tensor]:
    """Return for each exit [B, T, n_embd], the states that the last norm makes of what leaves so many layers.

    Args:
        shape: The model's shape.
        weights: Its tensors, by the names of `initial.initial_weights`.
        embeddings: f32[B, T, target's width], the target's embeddings of the texts; what follows a text does not
            change its states.
        exits: Numbers of layers, ascending.
    """
    x = F.linear(embeddings, weights["enter"].T)
    turns, found = _turns(shape, embeddings), []
    for i in range(exits[-1]):
        layer = {name.partition(".")[2]: values for name, values in weights.items() if name.startswith(f"{i}.")}
        x = x + F.linear(_attention(shape, layer, _rms(x, layer["attn_norm"], shape), turns), layer["o"])
        inner = _rms(x, layer["ffn_norm"], shape)
        x = x + F.linear(F.silu(F.linear(inner, layer["gate"])) * F.linear(inner, layer["up"]), layer["down"])
        if i + 1 in exits:
            found.append(_rms(x, weights["output_norm"], shape))
    return found


def _attention(shape: NarrowShape, layer: Weights, x: Tensor, turns: Tensor) -> Tensor:
    """Return [B, T, n_head * head_dim]: each row sees itself and the rows before."""
    n_batch, n_rows, _ = x.shape

    def heads(name: str) -> Tensor:
        found = F.linear(x, layer[name], layer.get(f"{name}_bias"))
        return found.view(n_batch, n_rows, -1, shape.head_dim).transpose(1, 2)

    q, k, v = _rotated(heads("q"), shape.n_rot, turns), _rotated(heads("k"), shape.n_rot, turns), heads("v")
    groups = shape.n_head // shape.n_head_kv
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(shape.head_dim))
    return out.transpose(1, 2).reshape(n_batch, n_rows, -1)


def _rms(x: Tensor, weight: Tensor, shape: NarrowShape) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + shape.rms_epsilon) * weight).to(x.dtype)


def _turns(shape: NarrowShape, like: Tensor) -> Tensor:
    """Return f32[2, T, n_rot / 2], the cosines and sines of the positions 0, 1, 2, ..."""
    steps = torch.arange(0, shape.n_rot, 2, device=like.device, dtype=torch.float64)
    speeds = shape.rope_base ** (-steps / shape.n_rot)
    angles = torch.arange(like.shape[1], device=like.device, dtype=torch.float64)[:, None] * speeds
    return torch.stack([angles.cos(), angles.sin()]).float()


def _rotated(x: Tensor, n_rot: int, turns: Tensor) -> Tensor:
    """Return [..., T, head_dim] turned to their positions: element 2 i with 2 i + 1."""
    a, b = x[..., 0:n_rot:2].float(), x[..., 1:n_rot:2].float()
    cos, sin = turns
    turned = torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2)
    return torch.cat([turned.to(x.dtype), x[..., n_rot:]], -1)
