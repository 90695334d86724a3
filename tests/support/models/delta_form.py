"""Networks with gated delta rules in float64, one row at a time: the logits of qwen35, qwen35moe and qwen3next.

The formulas are those of Yang et al. 2024 (arXiv:2412.06464), with the norms and gates of the architectures.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.gguf.file import GGUF, read_gguf

Floats = NDArray[np.float64]


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
        self._tensors = {name: _tensor(gguf, name) for name in gguf.tensors}
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
        normed: Floats = x / np.sqrt((x * x).mean(-1, keepdims=True) + self._epsilon) * weight
        return normed

    def _recurrence(self, w: dict[str, Floats], seen: _Seen, h: Floats) -> Floats:
        n_key_head, n_head = self._keys["ssm.group_count"], self._keys["ssm.time_step_rank"]
        n, length, per_key = self._keys["ssm.state_size"], self._keys["ssm.conv_kernel"], n_head // n_key_head
        seen.columns.append(w["attn_qkv.weight"] @ h)
        recent = np.array(seen.columns[-length:])
        mixed = _silu((recent * w["ssm_conv1d.weight"].T[-len(recent) :]).sum(0))
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
        gate = _silu(w["attn_gate.weight"] @ h).reshape(n_head, n)
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
        keys, values = (np.repeat(np.array(each), n_head // n_head_kv, 1) for each in (seen.keys, seen.values))
        scores = np.einsum("hd,nhd->hn", q, keys) / np.sqrt(d)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        result = np.einsum("hn,nhd->hd", weights / weights.sum(-1, keepdims=True), values)
        output: Floats = w["attn_output.weight"] @ (result * _sigmoid(both[:, 1])).ravel()
        return output

    def _rotate(self, heads: Floats) -> Floats:
        half = self._keys["rope.dimension_count"] // 2
        angles = self._n * float(self._keys["rope.freq_base"]) ** (-np.arange(half) / half)
        first, second, turned = heads[:, :half], heads[:, half : 2 * half], heads.copy()
        turned[:, :half] = first * np.cos(angles) - second * np.sin(angles)
        turned[:, half : 2 * half] = first * np.sin(angles) + second * np.cos(angles)
        return turned

    def _feed_forward(self, w: dict[str, Floats], h: Floats) -> Floats:
        def block(suffix: str, number: int | None = None) -> Floats:
            gate, up, down = (w[f"ffn_{name}{suffix}.weight"] for name in ("gate", "up", "down"))
            if number is not None:
                gate, up, down = gate[number], up[number], down[number]
            output: Floats = down @ (_silu(gate @ h) * (up @ h))
            return output

        if "ffn_gate_inp.weight" not in w:
            return block("")
        scores = w["ffn_gate_inp.weight"] @ h
        shares = np.exp(scores - scores.max())
        chosen = np.argsort(-shares, kind="stable")[: self._keys["expert_used_count"]]
        mixed = sum(shares[e] / shares[chosen].sum() * block("_exps", int(e)) for e in chosen)
        output: Floats = mixed + _sigmoid(w["ffn_gate_inp_shexp.weight"] @ h) * block("_shexp")
        return output


def _tensor(gguf: GGUF, name: str) -> Floats:
    shape = gguf.tensors[name].shape[::-1]
    return np.frombuffer(gguf.read_tensor_bytes(name), "<f4").astype(np.float64).reshape(shape)


def _sigmoid(x: Floats) -> Floats:
    result: Floats = 1 / (1 + np.exp(-x))
    return result


def _silu(x: Floats) -> Floats:
    return x * _sigmoid(x)
