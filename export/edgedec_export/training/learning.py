"""One step of training: a batch through several draft steps, and the optimizers' update of the head's tensors."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgedec_export.training.arithmetic import in_product_type, product_type
from edgedec_export.training.batches import Batch
from edgedec_export.training.network import TAP_SCALE, Tensor, Unroll, Weights, loss_of, target_shares
from edgedec_export.training.optimizing import Optimizers
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import HeadCard

DRAFT_STEPS = 4
"""Draft steps that training unrolls."""

_MATRIX_RATE, _VECTOR_RATE = 8e-3, 5e-3


@dataclass(slots=True)
class Borrowed:
    """What a head borrows from its target, on the device that trains.

    Attributes:
        parts: The target's file.
        token_ids: int32[n_vocab_draft], the tokens that the head can draft.
        rows: [n_vocab_draft, n_embd] of product_type, their rows of the output matrix.
        norm: f32[n_embd], the target's last norm.
        device: "cpu" or "cuda".
    """

    parts: TargetParts
    token_ids: Any
    rows: Tensor
    norm: Tensor
    device: str

    @classmethod
    def of(cls, parts: TargetParts, token_ids: Any, device: str) -> "Borrowed":
        """Return what a head with this short list borrows."""
        rows = torch.from_numpy(parts.output_rows(token_ids)).to(device, product_type(device))
        return cls(parts, token_ids, rows, torch.from_numpy(parts.output_norm).to(device), device)

    def embeddings(self, batch: Batch, n_steps: int) -> list[Tensor]:
        """Return for each step f32[B, T, n_embd], the embeddings of the tokens that it reads."""
        distinct, places = np.unique(batch.token_ids, return_inverse=True)
        table = torch.from_numpy(self.parts.embeddings(distinct)).to(self.device)
        placed = torch.from_numpy(places.reshape(batch.token_ids.shape)).to(self.device)
        n_rows = batch.taps.shape[1]
        return [table[placed[:, 1 + k : 1 + k + n_rows]] for k in range(n_steps)]


class Learner:
    """A head that learns.

    Attributes:
        card: The head's shape.
        weights: Its tensors, which every step changes.
    """

    def __init__(self, card: HeadCard, weights: Weights, borrowed: Borrowed) -> None:
        self.card = card
        self._borrowed = borrowed
        device = borrowed.device
        self.weights = {name: values.to(device).clone() for name, values in weights.items()}
        for name in weights.keys() - {TAP_SCALE}:
            self.weights[name].requires_grad_()
        self._optimizers = Optimizers(self.weights, _MATRIX_RATE, _VECTOR_RATE)

    def learn(self, batch: Batch, part: float) -> float:
        """Learn from a batch and return its loss, in nats.

        Args:
            batch: What to learn from, with DRAFT_STEPS steps.
            part: How much of the training is over, 0 to 1: the rate falls with a cosine.
        """
        b = self._borrowed
        head = {"rows": b.rows, "shares": self._shares(batch)}
        counted = [(self._on(at), self._on(which)) for at, which in zip(batch.at, batch.which, strict=True)]
        with in_product_type(b.device):
            unroll = Unroll.begin(self.card, self.weights, self._on(batch.taps).float())
            loss, handle = loss_of(unroll, b.embeddings(batch, DRAFT_STEPS), counted, head)
        self._optimizers.descend(handle, part)
        return float(loss)

    def _shares(self, batch: Batch) -> Tensor:
        with torch.no_grad():
            return target_shares(self._on(batch.last), self._borrowed.norm, self._borrowed.rows, self.card.rms_epsilon)

    def _on(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._borrowed.device)

    def state(self) -> dict[str, Any]:
        """Return all that changes, for restore()."""
        return self._optimizers.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        self._optimizers.restore(state)
