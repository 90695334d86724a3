"""A plain block head in float64: the oracle for faster ones (DFlash, arXiv:2602.06036; DSpark, arXiv:2607.05147).

    reference = ReferenceBlock(head, embedding=rows_of_target, output=rows_of_target)
    reference.absorb(taps)                       # of the tokens that stand
    drafted = reference.draft(token, 4)          # behind the newest token, which has no feature yet

The feature of a token is keys and values at the token's position in every layer. The rows of a block, which are the
newest token and masks, see the features of all tokens before it and each other. What follows a path of drafted tokens
is the row of its depth, with a bias by the tokens of the path.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.trained_heads.card import BlockShape
from edgedec_runtimes.trained_heads.head import Head

F64 = NDArray[np.float64]
Rows = Callable[[NDArray[np.int32]], NDArray[np.floating]]


@dataclass(frozen=True, slots=True)
class Block:
    """What one forward of a block made, for the rows that draft.

    Attributes:
        token: The newest token.
        states: float64[n_drafts, n_embd], the states after output_norm.
        scores: float64[n_drafts, n_vocab_draft], the logits without any bias.
    """

    token: int
    states: F64
    scores: F64


@dataclass(frozen=True, slots=True)
class Drafted:
    """A chain of the most probable tokens.

    Attributes:
        tokens: The target's ids.
        logits: float64[n, n_vocab_draft], with their biases.
        sure: The chance that each is accepted, by the confidence head; None without one.
    """

    tokens: tuple[int, ...]
    logits: F64
    sure: tuple[float, ...] | None


@dataclass(slots=True)
class ReferenceBlock:
    """A block head in float64 with its state for one text.

    Attributes:
        head: The head.
        embedding: Returns float[n, n_embd], the embeddings of int32[n] tokens: the target's, where the head has none.
        output: float[n_vocab_draft, n_embd], the output matrix: rows `d2t` of the target's, where the head has none.
        weights: The head's tensors as floats, by name.
        features: float64[n, n_embd], what fc and hidden_norm made of the taps of the tokens that stand.
    """

    head: Head
    embedding: Rows
    output: NDArray[np.floating]
    weights: dict[str, F64] = field(default_factory=dict)
    features: F64 = field(init=False)

    def __post_init__(self) -> None:
        self.weights = {name: tensor.floats().astype(np.float64) for name, tensor in self.head.tensors.items()}
        self.features = np.zeros((0, self.head.card.n_embd))

    @property
    def shape(self) -> BlockShape:
        """What makes the head a block head."""
        assert self.head.card.block is not None
        return self.head.card.block

    def absorb(self, taps: NDArray[np.floating]) -> None:
        """Take in the taps of tokens that stand, float[n, n_taps * n_embd_target]."""
        fused = self._norm(taps.astype(np.float64) @ self.weights["fc"].T, "hidden_norm")
        self.features = np.concatenate((self.features, fused))

    def rewind(self, n_tokens: int) -> None:
        """Keep the features of the first `n_tokens` tokens of the text."""
        self.features = self.features[:n_tokens]

    def block(self, token: int, n_rows: int | None = None) -> Block:
        """Return what a forward of a block makes behind `token`, which comes after the tokens that were absorbed.

        Args:
            n_rows: Rows of the block; None for as many as it was trained with.
        """
        card, shape, w = self.head.card, self.shape, self.weights
        n_rows = shape.size if n_rows is None else n_rows
        masks = self.embedding(np.array([shape.mask_token], np.int32)) if shape.mask_token >= 0 else w["mask"][None]
        newest = self.embedding(np.array([token], np.int32))
        x = shape.embedding_scale * np.concatenate((newest, masks.repeat(n_rows - 1, 0))).astype(np.float64)
        for i in range(shape.n_layer):
            layer = f"layers.{i}."
            x = x + self._attend(self._norm(x, layer + "input_norm"), i) @ w[layer + "o"].T
            m = self._norm(x, layer + "post_attention_norm")
            gate = m @ w[layer + "gate"].T
            x = x + (gate / (1 + np.exp(-gate)) * (m @ w[layer + "up"].T)) @ w[layer + "down"].T
        states = self._norm(x, "output_norm")[0 if shape.shifted else 1 :]
        scores = shape.logit_scale * states @ self.output.astype(np.float64).T
        if shape.softcap:
            scores = shape.softcap * np.tanh(scores / shape.softcap)
        assert scores.shape[1] == card.n_vocab_draft
        return Block(token, states, scores)

    def logits(self, block: Block, path: Sequence[int]) -> F64:
        """Return float64[n_vocab_draft], the logits of what follows the drafted tokens of `path`."""
        shape, w = self.shape, self.weights
        scores: F64 = block.scores[len(path)]
        if shape.markov == "none":
            return scores
        state, latent = np.zeros(shape.rank), np.zeros(shape.rank)
        for depth, token in enumerate((block.token, *path)):
            e, h = w["markov_w1"][token], block.states[depth]
            if shape.markov == "vanilla":
                latent = e
            elif shape.markov == "gated":
                latent = _sigmoid(w["markov_gate"] @ np.concatenate((h, e)) + w["markov_gate_bias"]) * e
            else:
                joint = w["markov_joint"] @ np.concatenate((state, e, h)) + w["markov_joint_bias"]
                update, candidate, output = np.split(joint, 3)
                state = _sigmoid(update) * state + (1 - _sigmoid(update)) * np.tanh(candidate)
                latent = np.tanh(output)
        return scores + w["markov_w2"] @ latent

    def confidence(self, block: Block, path: Sequence[int]) -> float:
        """Return the chance that what is drafted behind `path` is accepted, given that `path` was."""
        e = self.weights["markov_w1"][(block.token, *path)[-1]] if self.shape.rank else np.zeros(0)
        inputs = np.concatenate((block.states[len(path)], e))
        return float(_sigmoid(self.weights["confidence"][0] @ inputs + self.weights["confidence_bias"][0]))

    def draft(self, token: int, n: int, n_rows: int | None = None) -> Drafted:
        """Return the chain of the n most probable tokens behind `token`; n is at most what the block drafts."""
        block = self.block(token, n_rows)
        path: list[int] = []
        rows: list[F64] = []
        sure: list[float] = []
        for _ in range(n):
            rows.append(self.logits(block, path))
            if self.shape.confidence:
                sure.append(self.confidence(block, path))
            path.append(int(self.head.d2t[rows[-1].argmax()]))
        return Drafted(tuple(path), np.stack(rows), tuple(sure) if self.shape.confidence else None)

    def _attend(self, y: F64, i: int) -> F64:
        """Return float64[n_rows, n_head * head_dim]: what the rows of a block see in layer i."""
        card, shape, n_rows, anchor = self.head.card, self.shape, len(y), len(self.features)
        layer = f"layers.{i}."
        positions = np.arange(anchor + n_rows)
        sources = np.concatenate((self.features, y))
        q = self._heads(y, layer, "q", positions[anchor:])
        k = self._heads(sources, layer, "k", positions)
        v = (sources @ self.weights[layer + "v"].T).reshape(len(sources), card.n_head_kv, card.head_dim)
        grouped = q.reshape(n_rows, card.n_head_kv, -1, card.head_dim)
        scores = np.einsum("nkgd,mkd->kgnm", grouped, k) / np.sqrt(card.head_dim)
        seen = np.ones((n_rows, len(positions)), np.bool_)
        if shape.causal:
            seen &= positions[None] <= positions[anchor:, None]
        if shape.windows and shape.windows[i]:
            seen &= positions[None] >= anchor - shape.windows[i]
        scores = np.where(seen, scores, -np.inf)
        p = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p /= p.sum(axis=-1, keepdims=True)
        mixed: F64 = np.einsum("kgnm,mkd->nkgd", p, v).reshape(n_rows, -1)
        return mixed

    def _heads(self, rows: F64, layer: str, name: str, positions: NDArray[np.int64]) -> F64:
        """Return float64[n, heads, head_dim], q or k of rows, normed and rotated."""
        card = self.head.card
        x = (rows @ self.weights[layer + name].T).reshape(len(rows), -1, card.head_dim)
        x = self._norm(x, f"{layer}{name}_norm")
        frequencies = card.rope_base ** (-np.arange(0, card.head_dim, 2) / card.head_dim)
        if "rope_divisors" in self.weights:
            frequencies = frequencies / self.weights["rope_divisors"]
        angles = positions[:, None, None] * frequencies
        cos, sin = np.cos(angles), np.sin(angles)
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), axis=-1)

    def _norm(self, x: F64, name: str) -> F64:
        mean = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: F64 = x / np.sqrt(mean + self.head.card.rms_epsilon) * self.weights[name]
        return normed


def _sigmoid(x: F64) -> F64:
    out: F64 = 1 / (1 + np.exp(-x))
    return out
