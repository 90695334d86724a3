"""Tiny models with Mamba-2 mixers in float64, one token after another: what their logits are without any rounding."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from support.models.state_spaces import Mixer, rms_norm, silu
from support.models.tiny_quantized import Tiny, tiny_metadata, tiny_tensors

Floats = NDArray[np.float64]
_EPSILON = 1e-5


def exact_logits(tiny: Tiny, token_ids: Sequence[int]) -> Floats:
    """Return the logits f64[n, n_vocab] behind each token, of a model whose tensors are all of the type F32."""
    tensors = {
        name: np.frombuffer(raw.data, "<f4").reshape(raw.shape[::-1]).astype(np.float64)
        for name, raw in tiny_tensors(tiny).items()
    }
    key = tiny_metadata(tiny).get
    scales = [key(f"{tiny.architecture}.{name}_scale", 1.0) for name in ("embedding", "residual", "logit")]
    layers = [_Layer(tiny, tensors, i) for i in range(tiny.n_layer)]
    rows = []
    for position, token in enumerate(token_ids):
        x = tensors["token_embd.weight"][token] * scales[0]
        for layer in layers:
            for half in (layer.mix, layer.feed_forward):
                x = x + scales[1] * half(x, position)
        rows.append(tensors["output.weight"] @ rms_norm(x, tensors["output_norm.weight"], _EPSILON) / scales[2])
    return np.array(rows)


class _Layer:
    """A layer and what it remembers of the text."""

    def __init__(self, tiny: Tiny, tensors: dict[str, Floats], number: int) -> None:
        self._tiny, self._parts = tiny, tiny.parts[number % len(tiny.parts)]
        self._weight: Callable[[str], Any] = lambda name: tensors[f"blk.{number}.{name}"]
        self._names = [name.split(".", 2)[2] for name in tensors if name.startswith(f"blk.{number}.")]
        self._keys: list[Floats] = []
        self._values: list[Floats] = []
        self._mixer = Mixer(tiny.space, self._weight, _EPSILON) if "M" in self._parts else None

    def mix(self, x: Floats, position: int) -> Floats:
        """Return what attention and the mixer add to a hidden state."""
        if self._parts == "F":
            return np.zeros_like(x)
        normed = rms_norm(x, self._weight("attn_norm.weight"), _EPSILON)
        output = self._attention(normed, position) if "A" in self._parts else np.zeros_like(x)
        return output if self._mixer is None else output + self._mixer.step(normed)

    def feed_forward(self, x: Floats, position: int) -> Floats:
        """Return what the feed-forward block adds to a hidden state."""
        if "F" not in self._parts:
            return np.zeros_like(x)
        norms = ("ffn_norm.weight", "ffn_norm", "attn_norm.weight")  # the last one where it is the only norm
        normed = rms_norm(x, self._weight(next(name for name in norms if name in self._names)), _EPSILON)
        if "ffn_gate_inp.weight" not in self._names:
            return self._block(normed, "")
        key = dict(self._tiny.keys).get
        scores = self._weight("ffn_gate_inp.weight") @ normed
        chances = 1 / (1 + np.exp(-scores)) if key("expert_gating_func") == 2 else np.exp(scores - scores.max())
        bias = self._weight("exp_probs_b.bias") if "exp_probs_b.bias" in self._names else 0.0
        chosen = np.argsort(-(chances + bias))[: self._tiny.n_expert_used]
        shares = chances[chosen] / chances[chosen].sum() * key("expert_weights_scale", 1.0)
        outputs = [self._block(normed, "_exps", expert) for expert in chosen]
        mixed: Floats = (shares[:, None] * np.array(outputs)).sum(axis=0)
        return self._block(normed, "_shexp") + mixed

    def _block(self, x: Floats, suffix: str, expert: int | None = None) -> Floats:
        def matrix(name: str) -> Floats:
            found: Floats = self._weight(f"ffn_{name}{suffix}.weight")
            return found if expert is None else found[expert]

        up = matrix("up") @ x
        is_gated = f"ffn_gate{suffix}.weight" in self._names
        active = silu(matrix("gate") @ x) * up if is_gated else np.square(np.maximum(up, 0))
        return matrix("down") @ active

    def _attention(self, x: Floats, position: int) -> Floats:
        n, d = self._tiny.n_head, self._tiny.head_dim
        q, k, v = ((self._weight(f"attn_{name}.weight") @ x).reshape(-1, d) for name in "qkv")
        if self._tiny.architecture == "falcon-h1":
            q, k = _rotated(q, position), _rotated(k, position)
        self._keys.append(k)
        self._values.append(v)
        heads = np.arange(n) // (n // len(k))
        scale = dict(self._tiny.keys).get("attention.scale", d**-0.5)
        scores = np.einsum("hd,thd->ht", q, np.array(self._keys)[:, heads]) * scale
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        mixed = np.einsum("ht,thd->hd", shares, np.array(self._values)[:, heads])
        result: Floats = self._weight("attn_output.weight") @ mixed.ravel()
        return result


def _rotated(heads: Floats, position: int) -> Floats:
    half = heads.shape[1] // 2
    angles = position * 100000.0 ** (-np.arange(half) / half)
    first, second = heads[:, :half], heads[:, half:]
    turned = (first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles))
    return np.concatenate(turned, axis=1)
