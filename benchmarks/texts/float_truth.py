"""A model as its file means it: weights dequantized to float32, everything else in float32 or float64, in numpy.

    truth = FloatModel(read_gguf(path))
    states = truth.states([tokens, other_tokens])     # the layers, one after another, over all texts
    logits = truth.logits(states[0][:64])

It shares the readers of headers and of weights with the runtimes, but neither kernels nor the arrangement of weights.
It holds the matrices of one layer at a time, and those of the vocabulary.
"""

import itertools
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF
from edgedec_runtimes.architectures.reading import usual_tensors
from edgedec_runtimes.architectures.rope import turns_in
from edgedec_runtimes.cpu.network import Network, read_network
from edgedec_runtimes.weights.levels import dequantize, read_rows

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


class FloatModel:
    """Evaluates whole texts; every token sees those before it in its text."""

    def __init__(self, gguf: GGUF, n_ctx: int = 4096) -> None:
        self._network = read_network(gguf)
        self._gguf = usual_tensors(gguf, self._network)
        self._output: F32 | None = None
        self._n_ctx = n_ctx

    @property
    def network(self) -> Network:
        """Shape and switches."""
        return self._network

    def states(self, texts: Sequence[NDArray[np.int32]]) -> list[F64]:
        """Return f64[n, n_embd] for each text of int32[n]: the state after the last layer and norm, of every token."""
        n = self._network
        bounds = np.cumsum([0, *(len(text) for text in texts)])
        spans = [slice(begin, end) for begin, end in itertools.pairwise(bounds)]
        x = self._rows("token_embd.weight", np.concatenate(texts)).astype(np.float64) * n.switches.embedding_scale
        for layer in range(n.n_layer):
            x = x + self._attention(layer, x, spans) * n.switches.residual_scale
            x = x + self._feed_forward(layer, x) * n.switches.residual_scale
        x = self._norm("output_norm.weight", x)
        return [x[span] for span in spans]

    def logits(self, states: F64) -> F32:
        """Return f32[n, n_vocab] for states f64[n, n_embd]."""
        if self._output is None:
            tied = "output.weight" not in self._gguf.tensors
            self._output = self.matrix("token_embd.weight" if tied else "output.weight")
        result: F32 = states.astype(np.float32) @ self._output.T * np.float32(self._network.switches.logit_scale)
        return _capped(result, self._network.switches.logit_softcap)

    def matrix(self, name: str) -> F32:
        """Return f32[n_rows, n_columns]."""
        shape = self._gguf.tensors[name].shape
        return read_rows(self._gguf, name, 0, shape[1] if len(shape) > 1 else 1).reshape(shape[::-1])

    def _rows(self, name: str, rows: NDArray[np.int32]) -> F32:
        tensor = self._gguf.tensors[name]
        data = np.frombuffer(self._gguf.read_tensor_bytes(name), np.uint8).reshape(tensor.shape[1], -1)
        return dequantize(tensor.type, data[rows])

    def _vector(self, name: str) -> F32 | None:
        return self.matrix(name) if name in self._gguf.tensors else None

    def _times(self, name: str, x: F64, bias: str = "") -> F64:
        product = (x.astype(np.float32) @ self.matrix(name).T).astype(np.float64)
        added = self._vector(bias)
        return product if added is None else product + added

    def _norm(self, name: str, x: F64) -> F64:
        """Normalize the last axis; leave it alone where the model has no such norm."""
        weight = self._vector(name)
        if weight is None:
            return x
        mean: F64 = np.mean(x * x, axis=-1, keepdims=True)
        result: F64 = x / np.sqrt(mean + self._network.rms_epsilon) * weight
        return result

    def _attention(self, layer: int, x: F64, spans: list[slice]) -> F64:
        n, blk = self._network, f"blk.{layer}"
        switches, width = n.switches, -1 if n.switches.wide_norms else n.head_dim
        x = self._norm(f"{blk}.attn_norm.weight", x)
        q, k, v = (self._times(f"{blk}.attn_{name}.weight", x, f"{blk}.attn_{name}.bias") for name in "qkv")
        q, k = (
            self._norm(f"{blk}.attn_{name}_norm.weight", y.reshape(len(x), -1, width) if width > 0 else y)
            for name, y in (("q", q), ("k", k))
        )
        q, k, v = (y.reshape(len(x), -1, n.head_dim) for y in (q, k, v))
        mixed, sinks = np.empty((len(x), n.n_head * n.head_dim)), self._vector(f"{blk}.attn_sinks.weight")
        for span in spans:
            turned = [self._turned(layer, heads[span]) for heads in (q, k)]
            window = switches.sliding_window if switches.slides(layer) else 0
            turned[0] = turned[0] * self._temperatures(len(turned[0]))
            mixed[span] = self._attend(turned[0], turned[1], v[span], window, sinks)
        out = self._times(f"{blk}.attn_output.weight", mixed, f"{blk}.attn_output.bias")
        return self._norm(f"{blk}.post_attention_norm.weight", out)

    def _attend(self, q: F64, k: F64, v: F64, window: int, sinks: F32 | None) -> F64:
        """Return f64[n, n_head * head_dim]; `window` is how many tokens are seen, 0 for all."""
        n, group = len(q), self._network.n_head // self._network.n_head_kv
        hidden = np.triu(np.ones((n, n), np.bool_), 1)
        if window:
            hidden |= np.tril(np.ones((n, n), np.bool_), -window)
        out = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = q[:, head] @ k[:, head // group].T * self._network.switches.attention_scale
            scores = _capped(scores, self._network.switches.attention_softcap)
            scores = np.where(hidden, -np.inf, scores)
            if sinks is not None:
                scores = np.column_stack([scores, np.full(n, sinks[head])])
            out[:, head] = np.exp(log_softmax(scores))[:, :n] @ v[:, head // group]
        return out.reshape(n, -1)

    def _turned(self, layer: int, heads: F64) -> F64:
        """Return the heads of a text's queries or keys, f64[n, n_heads, head_dim], rotated to their positions."""
        switches = self._network.switches
        if not switches.rotates(layer):
            return heads
        found = turns_in(self._gguf, switches.rope_of(layer), self._n_ctx)
        angles = np.arange(len(heads))[:, None] * found.frequencies
        n_rot = self._network.n_rot
        turned = _turn(heads, angles, interleaved=switches.rope_interleaved)
        turned[..., :n_rot] *= found.magnitude
        return turned

    def _temperatures(self, n: int) -> F64:
        """Return f64[n, 1, 1], what the queries of a text's positions are multiplied by."""
        s = self._network.switches
        steps = np.arange(n) // s.temperature_tokens if s.temperature_tokens else np.zeros(n)
        result: F64 = (1 + s.temperature_scale * np.log1p(steps))[:, None, None]
        return result

    def _feed_forward(self, layer: int, x: F64) -> F64:
        blk = f"blk.{layer}"
        x = self._norm(f"{blk}.ffn_norm.weight", x)
        gate, up = self._times(f"{blk}.ffn_gate.weight", x), self._times(f"{blk}.ffn_up.weight", x)
        down = self._times(f"{blk}.ffn_down.weight", _ACTIVATIONS[self._network.switches.activation](gate) * up)
        return self._norm(f"{blk}.post_ffw_norm.weight", down)


def log_softmax(x: F64) -> F64:
    """Return the logarithm of the softmax of the last axis."""
    shifted = x - x.max(axis=-1, keepdims=True)
    result: F64 = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


_Floats = TypeVar("_Floats", F32, F64)


def _capped(x: _Floats, cap: float) -> _Floats:
    """Return cap * tanh(x / cap); x where there is no cap."""
    return np.tanh(x / cap) * cap if cap else x


def _silu(x: F64) -> F64:
    result: F64 = x / (1 + np.exp(-x))
    return result


def _gelu(x: F64) -> F64:
    """Return the tanh form, which gemma was trained with."""
    result: F64 = 0.5 * x * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return result


_ACTIVATIONS = {"silu": _silu, "gelu": _gelu}


def _turn(heads: F64, angles: F64, *, interleaved: bool) -> F64:
    """Rotate f64[n, n_heads, head_dim] by f64[n, n_rot / 2] (Su et al. 2021, arXiv:2104.09864)."""
    n_rot = 2 * angles.shape[1]
    first, second = (
        (slice(0, n_rot, 2), slice(1, n_rot, 2)) if interleaved else (slice(n_rot // 2), slice(n_rot // 2, n_rot))
    )
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turned = heads.copy()
    turned[..., first] = heads[..., first] * cos - heads[..., second] * sin
    turned[..., second] = heads[..., first] * sin + heads[..., second] * cos
    return turned
