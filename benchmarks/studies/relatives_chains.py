"""Three drafters of one layer beside EAGLE-3's, in torch: Clover, Chimera and FSPAD.

All read what an EAGLE-3 head reads: at row t the fused taps of token t, its feature, and the embeddings of the tokens
that follow. (In the papers the feature is what left the target's last layer; the lessons have that of answers alone,
and fused taps foresee more.) All share the target's output rows. Step k reads token t + 1 + k and foresees the next.

- Clover (arXiv:2405.00263, in its second form, 2408.00264): a layer reads the features, each with the token after it,
  once a round; then a recurrent cell takes in one token after the other. Nothing attends meanwhile.
- Chimera (arXiv:2402.15758): a layer reads the features, and at the end the last three tokens (the tri-gram) in place
  of a feature; what it returns stands in for the feature of the newest token in the steps that follow.
- FSPAD (arXiv:2408.15562): EAGLE's layer with a feed-forward block before it in which the token gates what passes of
  the feature, and with two outputs: one for the logits, one that is to come near the next feature and is read next.
"""

import math
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.nn.functional as F
from relatives_costs import DraftBytes, bytes_of
from relatives_learning import Step, embeddings_of, unit

from edgedec_export.training.batches import Batch
from edgedec_export.training.head_student import DRAFT_STEPS
from edgedec_export.training.learning import Borrowed
from edgedec_export.training.network import TAP_SCALE, Tensor, Weights, attend, heads_of, new_weights, rms
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_runtimes.trained_heads.card import HeadCard

FEATURE_WEIGHT = 1.0
"""Of the distance between a returned and the true feature in the loss, beside the cross entropy."""


def draft_bytes(weights: Weights, rows: float, round_names: Iterable[str], later: Iterable[str] = ()) -> DraftBytes:
    """Return the bytes that drafts read.

    Args:
        weights: The network's tensors.
        rows: Bytes of the output rows, read for each token.
        round_names: Tensors that are read once a round.
        later: Tensors that are read for each token but the first; all others are read for each.
    """
    round_names, later = set(round_names), set(later)
    each = rows + bytes_of(weights, weights.keys() - round_names - later - {TAP_SCALE})
    tokens = (each, *(each + bytes_of(weights, later) for _ in range(MOST_DRAFTED - 1)))
    return DraftBytes(bytes_of(weights, round_names), tokens)


class Chain:
    """What the three share: a layer as wide as the target, learned on as many steps as an EAGLE-3 head's.

    Attributes:
        card: The shape of the EAGLE-3 head that would be trained in its place.
        weights: Its tensors.
    """

    n_learned = DRAFT_STEPS
    matrix_rate = 8e-3

    def __init__(self, card: HeadCard, borrowed: Borrowed, tap_scale: object) -> None:
        self.card, self._parts, self._draw = card, borrowed.parts, torch.Generator().manual_seed(0)
        self.weights = new_weights(card, borrowed.parts.output_norm, tap_scale, 0)
        n_kv = card.n_head_kv * card.head_dim
        self.weights |= {"k": self._random(n_kv, card.n_embd, 1.0), "v": self._random(n_kv, card.n_embd, 1.0)}
        self.weights["q"] = self._random(card.n_head * card.head_dim, card.n_embd, 1.0)
        self._add()
        for name in self.weights.keys() - {TAP_SCALE}:
            self.weights[name].requires_grad_()

    def _add(self) -> None:
        """Add the network's own tensors."""

    def _random(self, n_out: int, n_in: int, scale: float = 0.2) -> Tensor:
        return torch.randn(n_out, n_in, generator=self._draw) * (scale / math.sqrt(n_in))

    def _features(self, batch: Batch) -> Tensor:
        """Return [B, T, n_embd], the fused taps."""
        return F.linear(torch.from_numpy(batch.taps).float() / self.weights[TAP_SCALE], self.weights["fc"])

    def _read(self, batch: Batch) -> Callable[[int], Tensor]:
        """Return what returns [B, T, n_embd], the embeddings of the tokens that come k places after the rows'."""
        table, n_rows = embeddings_of(self._parts, batch.token_ids), batch.taps.shape[1]
        return lambda k: table[:, k : k + n_rows]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms(x, self.weights[name], self.card)

    def _keys(self, normed: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """Return the keys, at the positions first, first + 1, ..., and the values of rows."""
        return heads_of(normed, self.weights["k"], self.card, first), heads_of(normed, self.weights["v"], self.card)

    def _query(self, normed: Tensor, first: int) -> Tensor:
        return heads_of(normed, self.weights["q"], self.card, first)

    def _inner(self, x: Tensor) -> Tensor:
        """Return what the feed-forward block adds to x."""
        w, normed = self.weights, self._norm(x, "post_attention_norm")
        return F.linear(F.silu(F.linear(normed, w["gate"])) * F.linear(normed, w["up"]), w["down"])

    def _distance(self, found: Tensor, features: Tensor, k: int) -> Tensor:
        """Return how far what step k returned is from the features of the tokens that it read."""
        n = features.shape[1] - k - 1
        return FEATURE_WEIGHT * F.smooth_l1_loss(found[:, :n].float(), features[:, k + 1 :].detach().float())


def _counted(outputs: Tensor, batch: Batch, k: int) -> Tensor:
    return outputs.flatten(0, 1)[torch.from_numpy(batch.at[k])]


class Clover(Chain):
    """Clover's layer and its recurrent cell."""

    def _add(self) -> None:
        n = self.card.n_embd
        for cell in ("first", "next"):
            self.weights[f"{cell}_norm"] = torch.ones(n)
            self.weights[f"{cell}_q"] = torch.eye(n) + self._random(n, n)
            self.weights[f"{cell}_k"] = torch.eye(n) + self._random(n, n)
            self.weights[f"{cell}_v"] = self._random(n, n)
        self.weights["layer_norm"] = torch.ones(n)
        self.weights["alone"] = torch.eye(n) + self._random(n, n)
        self.weights["joined"] = torch.cat([torch.eye(n), torch.zeros(n, n)], 1) + self._random(n, 2 * n)
        del self.weights["hidden_norm"]

    def steps(self, batch: Batch) -> Iterator[Step]:
        """Yield what the cell gives after each token."""
        w, read = self.weights, self._read(batch)
        x = self._taken(self._features(batch), read(1), "first")
        normed = self._norm(x, "input_norm")
        x = x + F.linear(attend(self._query(normed, 0), self._keys(normed, 0), ()), w["o"])
        state = self._norm(x + self._inner(x), "layer_norm")
        for k in range(len(batch.at)):
            if k:
                embeddings = read(1 + k)
                state = self._taken(state, embeddings, "next")
                y = F.linear(torch.cat([state, unit(embeddings)], -1), w["joined"])
            else:
                y = F.linear(state, w["alone"])
            yield Step(_counted(self._norm(y, "output_norm"), batch, k))

    def _taken(self, state: Tensor, embeddings: Tensor, cell: str) -> Tensor:
        """Return a state that has taken in a token: as much of it, head by head, as the two are alike."""
        w, shape = self.weights, (*state.shape[:-1], -1, self.card.head_dim)
        token = unit(embeddings)
        q, k = F.linear(self._norm(state, f"{cell}_norm"), w[f"{cell}_q"]), F.linear(token, w[f"{cell}_k"])
        alike = F.cosine_similarity(q.view(shape).float(), k.view(shape).float(), dim=-1, eps=1e-5)
        added = F.linear(token, w[f"{cell}_v"]).view(shape) * alike[..., None]
        return state + added.view(state.shape)

    def draft_bytes(self, rows: float) -> DraftBytes:
        """Return the bytes that drafts read."""
        later = {"next_q", "next_k", "next_v", "joined"}
        return draft_bytes(self.weights, rows, self.weights.keys() - later - {TAP_SCALE}, later)


class Chimera(Chain):
    """Chimera's tri-gram encoder, its layer, and one head, as its code drafts with one."""

    def _add(self) -> None:
        n = self.card.n_embd
        self.weights["gram_inner"] = self._random(3 * n, 3 * n)
        self.weights["gram"] = self._random(n, 3 * n, 1.0)
        self.weights["joined"] = torch.cat([torch.eye(n), torch.eye(n)], 1) + self._random(n, 2 * n)
        del self.weights["hidden_norm"]

    def steps(self, batch: Batch) -> Iterator[Step]:
        """Yield what the head gives after each token."""
        w, features, grams = self.weights, self._features(batch), self._grams(batch)
        n_rows = features.shape[1]
        seen = self._keys(self._norm(features, "input_norm"), 0)
        own: list[tuple[Tensor, Tensor]] = []
        for k in range(len(batch.at)):
            x = grams[:, 1 + k : 1 + k + n_rows]
            normed = self._norm(x, "input_norm")
            x = x + F.linear(attend(self._query(normed, 1 + k), seen, [*own, self._keys(normed, 1 + k)]), w["o"])
            x = x + self._inner(x)
            own.append(self._keys(self._norm(x, "input_norm"), 1 + k))  # it stands in for the feature from now on
            y = self._norm(F.linear(torch.cat([features, x], -1), w["joined"]), "output_norm")
            yield Step(_counted(y, batch, k), self._distance(x, features, k))

    def _grams(self, batch: Batch) -> Tensor:
        """Return [B, T + 1 + K, n_embd], for each token what the encoder makes of it and the two tokens before it.

        What would come before a text is its first token.
        """
        tokens = unit(embeddings_of(self._parts, batch.token_ids))
        padded = torch.cat([tokens[:, :1], tokens[:, :1], tokens], 1)
        x = torch.cat([padded[:, :-2], padded[:, 1:-1], tokens], -1)
        return F.linear(x + F.silu(F.linear(x, self.weights["gram_inner"])), self.weights["gram"])

    def draft_bytes(self, rows: float) -> DraftBytes:
        """Return the bytes that drafts read."""
        return draft_bytes(self.weights, rows, {"fc"})


class Fspad(Chain):
    """FSPAD's layer, with the block before it and the two outputs behind it."""

    def _add(self) -> None:
        n, n_ff = self.card.n_embd, self.card.n_ff
        self.weights["enter"] = self._random(n, 2 * n, 1.0)
        self.weights["enter_norm"] = torch.ones(n)
        self.weights["enter_gate"], self.weights["enter_up"] = self._random(n_ff, n, 1.0), self._random(n_ff, n, 1.0)
        self.weights["enter_down"] = self._random(n, n_ff)
        self.weights["attention_norm"] = torch.ones(n)
        self.weights["down"] = self._random(2 * n, n_ff)

    def steps(self, batch: Batch) -> Iterator[Step]:
        """Yield what the layer gives after each token."""
        w, read = self.weights, self._read(batch)
        features = state = self._features(batch)
        keys: list[tuple[Tensor, Tensor]] = []
        for k in range(len(batch.at)):
            token = self._norm(read(1 + k), "input_norm")
            a = F.linear(torch.cat([token, self._norm(state, "hidden_norm")], -1), w["enter"])
            gate = F.silu(F.linear(self._norm(a, "enter_norm"), w["enter_gate"]))
            a = a + F.linear(gate * F.linear(token, w["enter_up"]), w["enter_down"])
            normed = self._norm(a, "attention_norm")
            keys.append(self._keys(normed, k))
            x = state + a + F.linear(attend(self._query(normed, k), keys[0], keys[1:]), w["o"])
            for_logits, for_next = self._inner(x).chunk(2, -1)
            state = x + for_next
            y = self._norm(x + for_logits, "output_norm")
            yield Step(_counted(y, batch, k), self._distance(state, features, k))

    def draft_bytes(self, rows: float) -> DraftBytes:
        """Return the bytes that drafts read."""
        return draft_bytes(self.weights, rows, {"fc"})
