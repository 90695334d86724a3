"""Gemma 4 in float64, a token at a time, from the tensors of a file of F32: what runtimes are compared with."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF

F64 = NDArray[np.float64]
_TOP_BASE, _WINDOW_BASE = 100000.0, 10000.0


@dataclass(slots=True)
class Truth:
    """A model's tensors, and the keys and values of a text.

    Attributes:
        n_head: Heads of queries.
        sliding: By layer: whether it has a window.
        window: Its tokens.
        n_own: Layers that have keys and values of their own; those behind them read the last ones of their kind.
        n_used: Experts that a token goes through.
        epsilon: What norms add to the mean square.
    """

    tensors: Mapping[str, F64]
    n_head: int
    sliding: tuple[bool, ...]
    window: int
    n_own: int
    n_used: int
    epsilon: float
    keys: dict[int, list[F64]] = field(default_factory=dict)
    values: dict[int, list[F64]] = field(default_factory=dict)

    def __call__(self, token_ids: Iterable[int]) -> F64:
        """Return the logits f64[n, n_vocab] of a text."""
        return np.array([self._row(position, int(token)) for position, token in enumerate(token_ids)])

    def _row(self, position: int, token: int) -> F64:
        return np.asarray(30 * np.tanh(self.tensors["token_embd.weight"] @ self.state(position, token) / 30))

    def state(self, position: int, token: int) -> F64:
        """Return what leaves the last norm, f64[n_embd], for the token behind those that were read."""
        w, n_layer = self.tensors, len(self.sliding)
        x = w["token_embd.weight"][token] * math.sqrt(w["token_embd.weight"].shape[1])
        parts: F64 = np.zeros((n_layer, 0))
        if "per_layer_token_embd.weight" in w:
            table = w["per_layer_token_embd.weight"][token].reshape(n_layer, -1)
            projected = (w["per_layer_model_proj.weight"] @ x / math.sqrt(len(x))).reshape(n_layer, -1)
            normed = self._rms(projected, "per_layer_proj_norm.weight")
            parts = (normed + table * math.sqrt(table.shape[1])) / math.sqrt(2)
        for i in range(n_layer):
            x = self._layer(i, position, x, parts[i])
        return self._rms(x, "output_norm.weight")

    def _layer(self, i: int, position: int, x: F64, part: F64) -> F64:
        w, p = self.tensors, f"blk.{i}."
        mixed = w[p + "attn_output.weight"] @ self._attention(i, position, self._rms(x, p + "attn_norm.weight"))
        y = x + self._rms(mixed, p + "post_attention_norm.weight")
        block = self._block(p, "", self._rms(y, p + "ffn_norm.weight"))
        if p + "ffn_gate_inp.weight" in w:
            block = self._rms(block, p + "post_ffw_norm_1.weight")
            block = block + self._rms(self._experts(p, y), p + "post_ffw_norm_2.weight")
        y = y + self._rms(block, p + "post_ffw_norm.weight")
        if len(part):
            made = w[p + "proj.weight"] @ (_gelu(w[p + "inp_gate.weight"] @ y) * part)
            y = y + self._rms(made, p + "post_norm.weight")
        return np.asarray(y * w[p + "layer_output_scale.weight"])

    def _attention(self, i: int, position: int, h: F64) -> F64:
        w, p = self.tensors, f"blk.{i}.attn_"
        d = len(w[p + "q_norm.weight"])
        q = self._turned(i, position, self._rms((w[p + "q.weight"] @ h).reshape(-1, d), p + "q_norm.weight"))
        source = max(j for j in range(self.n_own) if self.sliding[j] == self.sliding[i]) if i >= self.n_own else i
        if source == i:
            k = (w[p + "k.weight"] @ h).reshape(-1, d)
            v = (w[p + "v.weight"] @ h).reshape(-1, d) if p + "v.weight" in w else k
            turned = self._turned(i, position, self._rms(k, p + "k_norm.weight"))
            self.keys.setdefault(i, []).append(turned)
            self.values.setdefault(i, []).append(self._rms(v))
        return self._seen(i, position, q, self.keys[source], self.values[source])

    def _seen(self, i: int, position: int, q: F64, all_keys: list[F64], all_values: list[F64]) -> F64:
        first = max(0, position - self.window + 1) if self.sliding[i] else 0
        keys, values = np.array(all_keys[first:]), np.array(all_values[first:])
        group = len(q) // keys.shape[1]
        out = [_softmax(keys[:, h // group] @ q[h]) @ values[:, h // group] for h in range(self.n_head)]
        return np.concatenate(out)

    def _turned(self, i: int, position: int, heads: F64) -> F64:
        half = heads.shape[1] // 2
        turns = (_WINDOW_BASE if self.sliding[i] else _TOP_BASE) ** (-np.arange(half) / half)
        if not self.sliding[i]:
            turns = turns / self.tensors["rope_freqs.weight"]
        cos, sin = np.cos(position * turns), np.sin(position * turns)
        a, b = heads[:, :half], heads[:, half:]
        return np.concatenate([a * cos - b * sin, a * sin + b * cos], axis=1)

    def _block(self, p: str, kind: str, h: F64) -> F64:
        w = self.tensors
        gate, up, down = (w[f"{p}ffn_{name}{kind}.weight"] for name in ("gate", "up", "down"))
        return np.asarray(down @ (_gelu(gate @ h) * (up @ h)))

    def _experts(self, p: str, y: F64) -> F64:
        w = self.tensors
        to_router = self._rms(y) / math.sqrt(len(y)) * w[p + "ffn_gate_inp.scale"]
        chances = _softmax(w[p + "ffn_gate_inp.weight"] @ to_router)
        best = np.argsort(-chances, kind="stable")[: self.n_used]
        h, total = self._rms(y, p + "pre_ffw_norm_2.weight"), np.zeros(len(y))
        for e in best:
            gate, up = np.split(w[p + "ffn_gate_up_exps.weight"][e], 2)
            made = w[p + "ffn_down_exps.weight"][e] @ (_gelu(gate @ h) * (up @ h))
            total = total + chances[e] / chances[best].sum() * w[p + "ffn_down_exps.scale"][e] * made
        return total

    def _rms(self, x: F64, weight: str | None = None) -> F64:
        normed = x / np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + self.epsilon)
        return np.asarray(normed if weight is None else normed * self.tensors[weight])


def tensors_of(gguf: GGUF) -> dict[str, F64]:
    """Return the tensors of a file of F32, their dimensions from the slowest to the fastest."""
    return {
        name: np.frombuffer(gguf.read_tensor_bytes(name), "<f4").astype(np.float64).reshape(tensor.shape[::-1])
        for name, tensor in gguf.tensors.items()
    }


def _gelu(x: F64) -> F64:
    return np.asarray(0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))))


def _softmax(x: F64) -> F64:
    e = np.exp(x - x.max())
    return np.asarray(e / e.sum())
