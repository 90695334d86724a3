"""The head in torch: its tensors, one draft step of a whole batch, and the loss over several steps.

Training lets the head read its own features (EAGLE-3's training-time test, arXiv:2503.01840): at step 0 row t sees the
target's features up to t; at step k it reads its own state of step k - 1 with the token k places further, and attends
to the target's features and to its own states of the same row.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.narrow.shape import NarrowShape
from edgedec_runtimes.trained_heads.card import HeadCard

Tensor = Any
"""A torch.Tensor; torch need not be installed where types are checked."""

Weights = dict[str, Tensor]
"""A head's tensors by the names of edgedec_runtimes.trained_heads.head, float32."""

TAP_SCALE = "tap_scale"
"""The one entry of Weights that is not learned, and not part of a finished head."""

ROWS_AT_ONCE = 256  # of logits: what is in the processor's cache need not be read from memory
FIRST_OUTPUT = 0.3  # of the target's output norm: a head that knows nothing should not be sure of anything
_STEP_WEIGHT = 0.8  # of each further draft step in the loss


def new_weights(card: HeadCard, output_norm: Any, tap_scale: Any, seed: int) -> Weights:
    """Return the tensors of a head that has learned nothing: its feature is the last tap, scaled.

    Args:
        card: The head's shape.
        output_norm: float32[n_embd], the target's.
        tap_scale: float32[n_taps * n_embd_target], the usual size of each element of the taps. Some elements of a
            residual stream are a hundred times as large as others, so `fc` learns on scaled taps.
        seed: Of the random numbers.
    """
    draw = torch.Generator().manual_seed(seed)
    n, n_q, n_kv = card.n_embd, card.n_head * card.head_dim, card.n_head_kv * card.head_dim

    def random(n_out: int, n_in: int, scale: float) -> Tensor:
        return torch.randn(n_out, n_in, generator=draw) * scale

    fc = random(n, len(card.taps) * card.n_embd_target, 0.2 / math.sqrt(n))
    fc[:, -card.n_embd_target :] += torch.eye(n, card.n_embd_target)
    wide, narrow = 1 / math.sqrt(2 * n), 0.2 / math.sqrt(n)
    weights = {
        "fc": fc,
        "q": random(n_q, 2 * n, wide),
        "k": random(n_kv, 2 * n, wide),
        "v": random(n_kv, 2 * n, wide),
        "o": random(n, n_q, narrow),
        "gate": random(card.n_ff, n, 1 / math.sqrt(n)),
        "up": random(card.n_ff, n, 1 / math.sqrt(n)),
        "down": random(n, card.n_ff, narrow),
    }
    norms = {name: torch.ones(n) for name in ("input_norm", "hidden_norm", "post_attention_norm")}
    extra = {"output_norm": FIRST_OUTPUT * output_norm, TAP_SCALE: tap_scale}
    return weights | norms | {name: torch.from_numpy(np.array(values, np.float32)) for name, values in extra.items()}


def folded(weights: Weights) -> dict[str, Any]:
    """Return float32 arrays by the names of `Weights`, with the scale of the taps put into `fc`."""
    arrays = {name: values.detach().cpu().float().numpy() for name, values in weights.items() if name != TAP_SCALE}
    arrays["fc"] = arrays["fc"] / weights[TAP_SCALE].detach().cpu().float().numpy()
    return arrays


@dataclass(slots=True)
class Unroll:
    """Draft steps over a batch of B sequences of T rows.

    Attributes:
        card: The head's shape.
        weights: Its tensors.
        state: [B, T, n_embd], what the last step gave; at first the fused features.
        n_steps: Steps so far.
    """

    card: HeadCard
    weights: Weights
    state: Tensor
    n_steps: int = 0
    _keys: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    @classmethod
    def begin(cls, card: HeadCard, weights: Weights, taps: Tensor) -> "Unroll":
        """Return an unroll before its first step; `taps` is [B, T, n_taps * n_embd_target]."""
        return cls(card, weights, F.linear(taps / weights[TAP_SCALE], weights["fc"]))

    def step(self, embeddings: Tensor) -> Tensor:
        """Read the next token of every row, given its embedding [B, T, n_embd]; return [B, T, n_embd] for the output.

        What is returned has passed the last norm; `state` has not.
        """
        c, w, x = self.card, self.weights, self.state
        pair = torch.cat([rms(embeddings, w["input_norm"], c), rms(x, w["hidden_norm"], c)], -1)
        x = x + F.linear(self._attention(pair), w["o"])
        inner = rms(x, w["post_attention_norm"], c)
        x = x + F.linear(F.silu(F.linear(inner, w["gate"])) * F.linear(inner, w["up"]), w["down"])
        self.state, self.n_steps = x, self.n_steps + 1
        return rms(x, w["output_norm"], c)

    def _attention(self, pair: Tensor) -> Tensor:
        """Return [B, T, n_head * head_dim]: each row sees step 0 up to itself, and its own later steps."""
        c, w = self.card, self.weights
        q, k = (heads_of(pair, w[name], c, self.n_steps) for name in ("q", "k"))
        self._keys.append((k, heads_of(pair, w["v"], c)))
        return attend(q, self._keys[0], self._keys[1:])


def heads_of(x: Tensor, matrix: Tensor, card: HeadCard, first: int | None = None) -> Tensor:
    """Return [B, heads, T, head_dim], rows times a matrix, turned to the positions first, first + 1, ... if given."""
    split = F.linear(x, matrix).view(*x.shape[:2], -1, card.head_dim).transpose(1, 2)
    return split if first is None else rotate(split, first, card.rope_base)


def attend(q: Tensor, seen: tuple[Tensor, Tensor], new: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Return [B, T, n_head * head_dim]: row t sees the rows of `seen` up to row t, and row t of each of `new`.

    Args:
        q: [B, n_head, T, head_dim].
        seen: Keys and values, each [B, n_head_kv, T, head_dim].
        new: More of them.
    """
    (n_batch, n_head, n_rows, d), (keys, values) = q.shape, seen
    n_kv, groups = keys.shape[1], n_head // keys.shape[1]
    q = q.reshape(n_batch, n_kv, groups, n_rows, d) / math.sqrt(d)
    scores = q.flatten(2, 3) @ keys.transpose(2, 3)
    scores = scores.view(n_batch, n_kv, groups, n_rows, n_rows)
    hidden = torch.ones(n_rows, n_rows, dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    alone = [(q * k[:, :, None]).sum(-1, keepdim=True).to(scores.dtype) for k, _ in new]
    share = torch.cat([scores, *alone], -1).softmax(-1).to(values.dtype)
    out = share[..., :n_rows].flatten(2, 3) @ values
    out = out.view(n_batch, n_kv, groups, n_rows, d)
    for i, (_, v) in enumerate(new):
        out = out + share[..., n_rows + i, None] * v[:, :, None]
    return out.flatten(1, 2).transpose(1, 2).reshape(n_batch, n_rows, -1)


def rms(x: Tensor, weight: Tensor, shape: HeadCard | NarrowShape) -> Tensor:
    """Return x, normed over its last axis and weighted, in x's type."""
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + shape.rms_epsilon)
    return (wide * scale * weight).to(x.dtype)


def rotate(x: Tensor, first: int, base: float) -> Tensor:
    """Return [..., T, head_dim] turned to the positions first, first + 1, ...: element i with i + head_dim / 2."""
    positions = torch.arange(first, first + x.shape[-2], device=x.device)
    return turned(x, *turns(positions, x.shape[-1], base))


def turns(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines, each f32[..., head_dim / 2], by which vectors at integer positions [...] turn."""
    speeds = base ** (-torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim)
    angles = positions.double()[..., None] * speeds
    return angles.cos().float(), angles.sin().float()


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return vectors [..., head_dim] turned, in their type: element i with i + head_dim / 2."""
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def target_shares(last: Tensor, norm: Tensor, rows: Tensor, epsilon: float) -> Tensor:
    """Return [n, n_vocab_draft] of product_type: the target's probabilities among the tokens that the head can draft.

    Args:
        last: [n, n_embd], what left the target's last layer.
        norm: [n_embd], the weights of its last norm.
        rows: [n_vocab_draft, n_embd] of product_type, the rows of its output matrix.
        epsilon: Of the norm.
    """
    pieces = []
    for part in last.split(ROWS_AT_ONCE):
        wide = part.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * norm
        logits = F.linear(normed.to(rows.dtype), rows).float()
        pieces.append(logits.softmax(-1).to(rows.dtype))
    return torch.cat(pieces) if pieces else last.new_zeros(0, len(rows), dtype=rows.dtype)


def most_probable(outputs: Tensor, rows: Tensor) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return the most probable token of each output, int64[n], and its probability, float32[n]."""
    tokens, chances = [], []
    for part in outputs.split(ROWS_AT_ONCE):
        logits = F.linear(part.to(rows.dtype), rows).float()
        best, place = logits.max(-1)
        tokens.append(place.cpu().numpy())
        chances.append((best - logits.logsumexp(-1)).exp().cpu().numpy())
    return np.concatenate(tokens), np.concatenate(chances)


def cross_entropy(outputs: Tensor, shares: Tensor, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy of a step's drafts, and its gradient by `outputs`.

    The gradient is (q - p) times the output rows, which do not learn; made at once, no row of logits is kept.

    Args:
        outputs: [n, n_embd], what Unroll.step returned for the rows that count.
        shares: What target_shares returned.
        which: int64[n], the row of `shares` that each output is to foresee.
        rows: [n_vocab_draft, n_embd] of product_type, the rows of the output matrix.
    """
    total, gradients = torch.zeros((), device=outputs.device), []
    with torch.no_grad():
        for y, index in zip(outputs.split(ROWS_AT_ONCE), which.split(ROWS_AT_ONCE), strict=True):
            logs = F.linear(y.to(rows.dtype), rows).float().log_softmax(-1)
            p = shares[index].float()
            total -= (p * logs).sum()
            gradients.append((logs.exp_() - p).to(rows.dtype) @ rows)
        n = max(1, len(which))
        gradient = torch.cat(gradients).float() / n if gradients else torch.zeros_like(outputs)
    return total / n, gradient


def loss_of(
    unroll: Unroll, embeddings: list[Tensor], counted: list[tuple[Tensor, Tensor]], head: Mapping[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the loss of several draft steps, and a number whose gradient by the weights is the loss's.

    Args:
        unroll: Before its first step.
        embeddings: For each step [B, T, n_embd], the embeddings of the tokens read.
        counted: For each step the rows that count, as indices into [B * T], and the rows of the shares they foresee.
        head: "rows" and "shares", as cross_entropy takes them.
    """
    loss, handle = torch.zeros(()), torch.zeros(())
    for k, (embedding, (at, which)) in enumerate(zip(embeddings, counted, strict=True)):
        outputs = unroll.step(embedding).flatten(0, 1)[at]
        value, gradient = cross_entropy(outputs.detach(), head["shares"], which, head["rows"])
        loss = loss.to(value.device) + _STEP_WEIGHT**k * value
        handle = handle.to(value.device) + _STEP_WEIGHT**k * (outputs.float() * gradient).sum()
    return loss, handle
