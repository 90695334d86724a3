"""Networks with states in float64, one token after another: what their logits are without any rounding.

The gated delta rules are those of Yang et al. 2024 (arXiv:2412.06464), with the norms and gates of the architectures.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import read_gguf
from support.models.gemma4_truth import tensors_of
from support.models.state_spaces import Mixer, rms_norm, silu
from support.models.tiny_quantized import Tiny, tiny_metadata, tiny_tensors

Floats = NDArray[np.float64]
_EPSILON = 1e-5  # of networks with Mamba-2 mixers


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
        d = self._tiny.head_dim
        q, k, v = ((self._weight(f"attn_{name}.weight") @ x).reshape(-1, d) for name in "qkv")
        if self._tiny.architecture == "falcon-h1":
            q, k = (_rotated(heads, position, 100000.0, d) for heads in (q, k))
        self._keys.append(k)
        self._values.append(v)
        scale = dict(self._tiny.keys).get("attention.scale", d**-0.5)
        result: Floats = self._weight("attn_output.weight") @ _attended(q, self._keys, self._values, scale)
        return result


@dataclass
class _Seen:
    """What a layer knows of the rows before."""

    keys: list[Floats] = field(default_factory=list)
    values: list[Floats] = field(default_factory=list)
    columns: list[Floats] = field(default_factory=list)
    state: Floats | None = None


class DeltaForm:
    """A network of F32 tensors, as a GGUF has it."""

    def __init__(self, path: Path) -> None:
        gguf = read_gguf(path)
        self._tensors = tensors_of(gguf)
        arch = gguf.metadata["general.architecture"]
        self._keys: dict[str, Any] = {
            key.partition(".")[2]: value for key, value in gguf.metadata.items() if key.startswith(f"{arch}.")
        }
        self._epsilon = float(self._keys["attention.layer_norm_rms_epsilon"])
        self._seen = [_Seen() for _ in range(self._keys["block_count"])]
        self._n = 0
        self._is_joined = arch == "qwen3next"

    def logits(self, token: int) -> Floats:
        """Return the logits behind the next token of the text."""
        t = self._tensors
        x = t["token_embd.weight"][token]
        for layer, seen in enumerate(self._seen):
            w = {name.split(".", 2)[2]: tensor for name, tensor in t.items() if name.startswith(f"blk.{layer}.")}
            h = self._norm(x, w["attn_norm.weight"])
            x = x + (self._recurrence(w, seen, h) if "ssm_out.weight" in w else self._attention(w, seen, h))
            x = x + self._feed_forward(w, self._norm(x, w["post_attention_norm.weight"]))
        self._n += 1
        logits: Floats = t.get("output.weight", t["token_embd.weight"]) @ self._norm(x, t["output_norm.weight"])
        return logits

    def _norm(self, x: Floats, weight: Floats) -> Floats:
        return rms_norm(x, weight, self._epsilon)

    def _recurrence(self, w: dict[str, Floats], seen: _Seen, h: Floats) -> Floats:
        n_key_head, n_head = self._keys["ssm.group_count"], self._keys["ssm.time_step_rank"]
        n, length, per_key = self._keys["ssm.state_size"], self._keys["ssm.conv_kernel"], n_head // n_key_head
        seen.columns.append(w["attn_qkv.weight"] @ h)
        recent = np.array(seen.columns[-length:])
        mixed = silu((recent * w["ssm_conv1d.weight"].T[-len(recent) :]).sum(0))
        q, k, v = (part.reshape(-1, n) for part in np.split(mixed, (n_key_head * n, 2 * n_key_head * n)))
        q, k = (y / np.sqrt((y * y).sum(-1, keepdims=True) + self._epsilon) for y in (q, k))
        if self._is_joined:  # neighbouring heads have the same key
            joined = (w["ssm_ba.weight"] @ h).reshape(n_key_head, 2, per_key)
            beta, alpha, of_head = joined[:, 0].ravel(), joined[:, 1].ravel(), np.arange(n_head) // per_key
        else:
            beta, alpha, of_head = w["ssm_beta.weight"] @ h, w["ssm_alpha.weight"] @ h, np.arange(n_head) % n_key_head
        q, k = q[of_head] / np.sqrt(n), k[of_head]
        decay = np.exp(w["ssm_a"] * np.logaddexp(0, alpha + w["ssm_dt.bias"]))
        state = np.zeros((n_head, n, n)) if seen.state is None else seen.state * decay[:, None, None]
        update = _sigmoid(beta)[:, None] * (v - np.einsum("hij,hi->hj", state, k))
        seen.state = state + k[:, :, None] * update[:, None, :]
        result = self._norm(np.einsum("hij,hi->hj", seen.state, q), w["ssm_norm.weight"])
        gate = silu(w["attn_gate.weight"] @ h).reshape(n_head, n)
        output: Floats = w["ssm_out.weight"] @ (result * gate).ravel()
        return output

    def _attention(self, w: dict[str, Floats], seen: _Seen, h: Floats) -> Floats:
        n_head, n_head_kv = self._keys["attention.head_count"], self._keys["attention.head_count_kv"]
        d = self._keys["attention.key_length"]
        both = (w["attn_q.weight"] @ h).reshape(n_head, 2, d)
        q = self._rotate(self._norm(both[:, 0], w["attn_q_norm.weight"]))
        k = (w["attn_k.weight"] @ h).reshape(n_head_kv, d)
        seen.keys.append(self._rotate(self._norm(k, w["attn_k_norm.weight"])))
        seen.values.append((w["attn_v.weight"] @ h).reshape(n_head_kv, d))
        mixed = _attended(q, seen.keys, seen.values, d**-0.5)
        output: Floats = w["attn_output.weight"] @ (mixed * _sigmoid(both[:, 1].ravel()))
        return output

    def _rotate(self, heads: Floats) -> Floats:
        return _rotated(heads, self._n, float(self._keys["rope.freq_base"]), self._keys["rope.dimension_count"])

    def _feed_forward(self, w: dict[str, Floats], h: Floats) -> Floats:
        def block(suffix: str, number: int | None = None) -> Floats:
            gate, up, down = (w[f"ffn_{name}{suffix}.weight"] for name in ("gate", "up", "down"))
            if number is not None:
                gate, up, down = gate[number], up[number], down[number]
            output: Floats = down @ (silu(gate @ h) * (up @ h))
            return output

        if "ffn_gate_inp.weight" not in w:
            return block("")
        scores = w["ffn_gate_inp.weight"] @ h
        shares = np.exp(scores - scores.max())
        chosen = np.argsort(-shares, kind="stable")[: self._keys["expert_used_count"]]
        mixed = sum(shares[e] / shares[chosen].sum() * block("_exps", int(e)) for e in chosen)
        output: Floats = mixed + _sigmoid(w["ffn_gate_inp_shexp.weight"] @ h) * block("_shexp")
        return output


def _attended(q: Floats, keys: list[Floats], values: list[Floats], scale: float) -> Floats:
    """Return float64[n_head * head_dim]: what the heads of one token see in all tokens up to it."""
    heads = np.arange(len(q)) // (len(q) // len(keys[0]))
    scores = np.einsum("hd,thd->ht", q, np.array(keys)[:, heads]) * scale
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    mixed: Floats = np.einsum("ht,thd->hd", shares, np.array(values)[:, heads]).ravel()
    return mixed


def _rotated(heads: Floats, position: int, base: float, n_rotated: int) -> Floats:
    half = n_rotated // 2
    angles = position * base ** (-np.arange(half) / half)
    first, second, turned = heads[:, :half], heads[:, half:n_rotated], heads.copy()
    turned[:, :half] = first * np.cos(angles) - second * np.sin(angles)
    turned[:, half:n_rotated] = first * np.sin(angles) + second * np.cos(angles)
    return turned


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-x))
    return result
