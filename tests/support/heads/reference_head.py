"""A plain numpy draft head: the oracle for faster ones, and the measure for a head's quantization.

    reference = ReferenceHead(head, embedding=rows_of_target, output=rows_of_target)
    reference.absorb(taps)                       # of the tokens that stand
    tokens, logits = reference.draft(text, 4)    # after the newest token of the text

The algorithm is EAGLE-3's (arXiv:2503.01840). The feature of position t and the token t + 1 are a pair; the layer's
output for a pair scores token t + 2. A drafted token is paired with the layer's own output instead of a feature.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.trained_heads.head import Head

F32 = NDArray[np.float32]
Rows = Callable[[NDArray[np.int32]], F32]


@dataclass(slots=True)
class ReferenceHead:
    """A head in float32 with its state for one text.

    Attributes:
        head: The head.
        embedding: Returns float32[n, n_embd], the embeddings of int32[n] tokens: the target's, where the head has none.
        output: float32[n_vocab_draft, n_embd], the output matrix: rows `d2t` of the target's, where the head has none.
        weights: The head's tensors as floats, by name.
        features: float32[n, n_embd], what fc made of the taps of the tokens that stand.
        keys: float32[n_pairs, n_head_kv, head_dim], rotated; `values` likewise.
    """

    head: Head
    embedding: Rows
    output: F32
    weights: dict[str, F32] = field(default_factory=dict)
    features: F32 = field(init=False)
    keys: F32 = field(init=False)
    values: F32 = field(init=False)

    def __post_init__(self) -> None:
        card = self.head.card
        self.weights = {name: tensor.floats() for name, tensor in self.head.tensors.items()}
        self.features = np.zeros((0, card.n_embd), np.float32)
        self.keys = np.zeros((0, card.n_head_kv, card.head_dim), np.float32)
        self.values = self.keys

    def fuse(self, taps: F32) -> F32:
        """Return float32[n, n_embd], the features of float32[n, n_taps * n_embd_target] taps."""
        card = self.head.card
        if card.fc_norm == "joined":
            taps = self._norm(taps, "fc_norm")
        elif card.fc_norm == "each":
            each = taps.reshape(len(taps), -1, card.n_embd_target)
            weight = self.weights["fc_norm"].reshape(-1, card.n_embd_target)
            taps = (_rms(each, card.rms_epsilon) * weight).reshape(taps.shape)
        fused: F32 = taps @ self.weights["fc"].T
        return fused

    def absorb(self, taps: F32) -> None:
        """Take in the taps of tokens that stand, float32[n, n_taps * n_embd_target]."""
        self.features = np.concatenate((self.features, self.fuse(taps)))

    def rewind(self, n_tokens: int) -> None:
        """Keep the features of the first `n_tokens` tokens of the text, and the pairs that need no later token."""
        self.features = self.features[:n_tokens]
        n_pairs = max(min(len(self.keys), n_tokens - 1), 0)
        self.keys, self.values = self.keys[:n_pairs], self.values[:n_pairs]

    def draft(self, text: Sequence[int], n: int) -> tuple[list[int], F32]:
        """Return a chain of n drafted tokens after a text, and their logits.

        Args:
            text: The tokens; the features of all but the last were absorbed.
            n: How many tokens to draft; at least 1.

        Returns:
            The tokens as the target's ids, and float32[n, n_vocab_draft].
        """
        assert len(self.features) == len(text) - 1 >= 1, "every token but the newest has a feature"
        tokens = np.asarray(text, np.int32)
        first = len(self.keys)
        state = self.layer(tokens[first + 1 :], self.features[first:], first)[-1:]
        n_pairs, keys, values = len(self.keys), self.keys, self.values
        drafted: list[int] = []
        rows: list[F32] = []
        for i in range(n):
            rows.append(self.logits(state)[0])
            drafted.append(int(self.head.d2t[rows[-1].argmax()]))
            if i + 1 < n:
                back = self._norm(state, "output_norm") if self.head.card.feeds_back_normed else state
                state = self.layer(np.array(drafted[-1:], np.int32), back, n_pairs + i)
        self.keys, self.values = keys, values  # those of drafted pairs are dropped
        return drafted, np.stack(rows)

    def logits(self, states: F32) -> F32:
        """Return float32[n, n_vocab_draft] for float32[n, n_embd], outputs of the layer."""
        normed = self._norm(states, "output_norm") if self.head.card.norms_output else states
        logits: F32 = normed @ self.output.T
        return logits

    def layer(self, tokens: NDArray[np.int32], features: F32, position: int) -> F32:
        """Return the layer's output for pairs at `position` and after, whose keys and values are then cached."""
        card, w, n = self.head.card, self.weights, len(tokens)
        normed = self._norm(features, "hidden_norm")
        pair = np.concatenate((self._norm(self.embedding(tokens), "input_norm"), normed), axis=1)
        turns = self._turns(np.arange(position, position + n))
        q = _rotate((pair @ w["q"].T).reshape(n, card.n_head, card.head_dim), turns)
        k = _rotate((pair @ w["k"].T).reshape(n, card.n_head_kv, card.head_dim), turns)
        self.keys = np.concatenate((self.keys[:position], k))
        self.values = np.concatenate((self.values[:position], (pair @ w["v"].T).reshape(k.shape)))
        residual = normed if card.norm_before_residual else features
        hidden = residual + self._attend(q, position) @ w["o"].T
        m = self._norm(hidden, "post_attention_norm")
        gate = m @ w["gate"].T
        out: F32 = hidden + (gate / (1 + np.exp(-gate)) * (m @ w["up"].T)) @ w["down"].T
        return out

    def _attend(self, q: F32, position: int) -> F32:
        """Return float32[n, n_head * head_dim]: each query sees the pairs up to its own."""
        card, n = self.head.card, len(q)
        grouped = q.reshape(n, card.n_head_kv, -1, card.head_dim)
        scores = np.einsum("nkgd,mkd->kgnm", grouped, self.keys) / np.float32(np.sqrt(card.head_dim))
        future = np.arange(len(self.keys))[None] > position + np.arange(n)[:, None]
        scores = np.where(future, -np.inf, scores)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        mixed: F32 = np.einsum("kgnm,mkd->nkgd", p, self.values).reshape(n, -1).astype(np.float32)
        return mixed

    def _turns(self, positions: NDArray[np.int64]) -> tuple[F32, F32]:
        card = self.head.card
        frequencies = card.rope_base ** (-np.arange(0, card.head_dim, 2) / card.head_dim)
        if "rope_divisors" in self.weights:
            frequencies = frequencies / self.weights["rope_divisors"]
        angles = positions[:, None, None] * frequencies
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def _norm(self, x: F32, name: str) -> F32:
        normed: F32 = _rms(x, self.head.card.rms_epsilon) * self.weights[name]
        return normed


def _rms(x: F32, epsilon: float) -> F32:
    out: F32 = x / np.sqrt(np.mean(np.square(x, dtype=np.float64), axis=-1, keepdims=True) + epsilon).astype(np.float32)
    return out


def _rotate(x: F32, turns: tuple[F32, F32]) -> F32:
    """Rotate element i of each head with element i + head_dim / 2."""
    cos, sin = turns
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)
