"""What every drafter that learns has: its tensors and their optimizers, what it borrows of its target, its drafts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgedec_export.training.arithmetic import in_product_type, product_type
from edgedec_export.training.batches import grouped_by_length
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import TAP_SCALE, Tensor, Weights, target_shares
from edgedec_export.training.optimizing import Optimizers
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.head import Head

Drafting = Callable[[Sequence[Lesson]], list[Drafted]]
"""Returns what is drafted on a few lessons."""

MATRIX_RATE, VECTOR_RATE = 8e-3, 5e-3  # of heads and block drafters


@dataclass(slots=True)
class Borrowed:
    """What a drafter borrows from its target, on the device that trains.

    Attributes:
        parts: The target's file.
        token_ids: int32[n_vocab_draft], the tokens that the drafter can draft, or learns to tell apart.
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
        """Return what a drafter with this short list borrows."""
        rows = torch.from_numpy(parts.output_rows(token_ids)).to(device, product_type(device))
        return cls(parts, token_ids, rows, torch.from_numpy(parts.output_norm).to(device), device)

    def embeddings(self, token_ids: NDArray[np.integer]) -> Tensor:
        """Return f32[..., n_embd], the embeddings of tokens, int[...]; each token's is read once."""
        distinct, places = np.unique(token_ids, return_inverse=True)
        table = torch.from_numpy(self.parts.embeddings(distinct)).to(self.device)
        return table[torch.from_numpy(places.reshape(token_ids.shape)).to(self.device)]


class Student(ABC):
    """A drafter that learns; a subclass says by which loss, and what it drafts.

    Args:
        borrowed: What it borrows.
        weights: Its first tensors, on any device. All but TAP_SCALE learn.
        epsilon: Of norms.
        matrix_rate: The highest learning rate of matrices.
        vector_rate: The highest learning rate of vectors.
        table: As of Optimizers.

    Attributes:
        weights: The tensors, which learn() changes.
        n_rows: Rows of a batch that does not learn.
    """

    n_rows = 4096

    def __init__(
        self,
        borrowed: Borrowed,
        weights: Weights,
        epsilon: float,
        *,
        matrix_rate: float = MATRIX_RATE,
        vector_rate: float = VECTOR_RATE,
        table: str = "",
    ) -> None:
        self._borrowed, self._epsilon = borrowed, epsilon
        self.weights: Weights = {name: values.clone().to(borrowed.device) for name, values in weights.items()}
        for name in weights.keys() - {TAP_SCALE}:
            self.weights[name].requires_grad_()
        self._optimizers = Optimizers(self.weights, matrix_rate, vector_rate, table)

    def learn(self, lessons: Sequence[Lesson], part: float) -> float:
        """Learn from lessons and return the loss, in nats.

        Args:
            lessons: Those of a batch.
            part: How much of the training is over, 0 to 1: the rate falls with a cosine.
        """
        with in_product_type(self._borrowed.device):
            loss, handle = self._loss(lessons, part)
        self._optimizers.descend(handle, part)
        return float(loss)

    def begin(self, head: Head) -> None:
        """Begin as a head that has learned."""
        with torch.no_grad():
            for name in self.weights.keys() - {TAP_SCALE}:
                self.weights[name].copy_(self._on(head.tensors[name].floats()))
            if "fc" in self.weights:
                self.weights["fc"].mul_(self.weights[TAP_SCALE])

    def drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what the drafter drafts with these tensors after each token of each lesson's answer but the last one.

        Args:
            weights: Tensors, which may be an earlier state of its own.
            lessons: Lessons; those of a single token are left out.
        """
        on_device = {name: values.detach().to(self._borrowed.device) for name, values in weights.items()}
        drafts: list[Drafted] = []
        with torch.no_grad(), in_product_type(self._borrowed.device):
            drafted = self._drafting(on_device)
            for group in grouped_by_length([lesson for lesson in lessons if lesson.n_answer > 1], self.n_rows):
                drafts += drafted(group)
        return drafts

    @abstractmethod
    def _loss(self, lessons: Sequence[Lesson], part: float) -> tuple[Tensor, Tensor]:
        """Return the loss, and a number whose gradient by the tensors is the loss's."""

    @abstractmethod
    def _drafting(self, weights: Weights) -> Drafting:
        """Return what drafts with these tensors, which are on the device."""

    def _shares(self, last: NDArray[np.float16]) -> Tensor:
        """Return what target_shares makes of [n, n_embd], what left the target's last layer."""
        with torch.no_grad():
            return target_shares(self._on(last), self._borrowed.norm, self._borrowed.rows, self._epsilon)

    def _on(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self._borrowed.device)

    def state(self) -> dict[str, Any]:
        """Return all that changes, for restore()."""
        return self._optimizers.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        self._optimizers.restore(state)
