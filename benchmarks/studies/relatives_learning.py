"""A network that foresees tokens among the target's own output rows: how it learns, and what it drafts.

Whatever the network is, its training form gives for step k and every place of an answer what drafting there would give
as token number k, after the tokens that the text has: an accepted draft is the text.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from relatives_costs import DraftBytes

from edgedec_export.training.arithmetic import in_product_type
from edgedec_export.training.batches import Batch, batch_of, grouped_by_length
from edgedec_export.training.learning import Borrowed
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Tensor, Weights, cross_entropy, target_shares
from edgedec_export.training.optimizing import Optimizers
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts

STEP_WEIGHT = 0.8
"""Of each further token of a draft in the loss, as Medusa and EAGLE-3 have it."""
_ROWS = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What a network gives for one token of a draft.

    Attributes:
        outputs: [n, n_embd], what the output rows turn into logits, for the tokens `batch.which` of the step.
        aside: A further loss of the step: a number, 0 for most networks.
    """

    outputs: Tensor
    aside: Tensor | float = 0.0


class Network(Protocol):
    """A network.

    Attributes:
        weights: Its tensors; those that require a gradient learn.
        n_learned: Steps that it learns on.
        matrix_rate: The highest learning rate of its matrices.
    """

    weights: Weights
    n_learned: int
    matrix_rate: float

    def steps(self, batch: Batch) -> Iterator[Step]:
        """Yield what the network gives for each step of a batch."""

    def draft_bytes(self, rows: float) -> DraftBytes:
        """Return the bytes that drafts read; the output rows have `rows`."""


class Learner:
    """A network that learns. Matrices are updated by Muon, vectors by AdamW, as EAGLE-3 heads are.

    Attributes:
        network: The network.
        weights: Its tensors, which every step changes.
    """

    _VECTOR_RATE = 5e-3

    def __init__(self, network: Network, borrowed: Borrowed) -> None:
        self.network, self.weights = network, network.weights
        self._borrowed, self._epsilon = borrowed, borrowed.parts.network.rms_epsilon
        self._can_draft = np.zeros(borrowed.parts.network.n_vocab, np.bool_)
        self._can_draft[borrowed.token_ids] = True
        self._optimizers = Optimizers(self.weights, network.matrix_rate, self._VECTOR_RATE)

    def learn(self, lessons: Sequence[Lesson], part: float) -> float:
        """Learn from lessons and return the cross entropy, in nats; `part` of the training is over, 0 to 1."""
        b, batch = self._borrowed, batch_of(lessons, self.network.n_learned, self._can_draft)
        with torch.no_grad():
            shares = target_shares(torch.from_numpy(batch.last), b.norm, b.rows, self._epsilon)
        loss, handle = 0.0, torch.zeros(())
        with in_product_type("cpu"):
            for k, step in enumerate(self.network.steps(batch)):
                which = torch.from_numpy(batch.which[k])
                found, gradient = cross_entropy(step.outputs.detach(), shares, which, b.rows)
                loss += STEP_WEIGHT**k * float(found)
                handle = handle + STEP_WEIGHT**k * ((step.outputs.float() * gradient).sum() + step.aside)
        self._optimizers.descend(handle, part)
        return loss

    def drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what it drafts after each token of each lesson's answer; lessons of one token are left out.

        Args:
            weights: Its own tensors.
            lessons: The lessons.
        """
        assert weights is self.weights, "a network of this study is measured as it is"
        found: list[Drafted] = []
        with torch.no_grad(), in_product_type("cpu"):
            for group in grouped_by_length([lesson for lesson in lessons if lesson.n_answer > 1], _ROWS):
                found += self._drafted(group)
        return found

    def _drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        batch, rows = batch_of(lessons, MOST_DRAFTED), self._borrowed.rows
        shape = len(batch.answers), MOST_DRAFTED
        right, sure = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        for k, step in enumerate(self.network.steps(batch)):
            best, place = F.linear(step.outputs.to(rows.dtype), rows).float().softmax(-1).max(-1)
            which = batch.which[k]
            right[which - k - 1, k] = self._borrowed.token_ids[place.numpy()] == batch.answers[which]
            sure[which - k - 1, k] = best.float().numpy()
        return cut_by_lesson(lessons, right, sure)

    def state(self) -> dict[str, Any]:
        """Return all that changes, for restore()."""
        return self._optimizers.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        self._optimizers.restore(state)


def unit(x: Tensor) -> Tensor:
    """Return x divided by the root of the mean square of its last axis, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)


def embeddings_of(parts: TargetParts, token_ids: NDArray[np.integer]) -> Tensor:
    """Return float32[..., n_embd], the target's embeddings of tokens."""
    known, places = np.unique(token_ids, return_inverse=True)
    return torch.from_numpy(parts.embeddings(known))[torch.from_numpy(places.reshape(token_ids.shape))]


def cut_by_lesson(lessons: Sequence[Lesson], right: NDArray[np.bool_], sure: NDArray[np.float32]) -> list[Drafted]:
    """Return drafts by lesson: a draft may begin after each token of an answer but the last.

    Args:
        lessons: The lessons.
        right: bool[N, K] with a row for each token of the lessons' answers: the drafts after the token before it.
        sure: float32[N, K], likewise.
    """
    found, first = [], 0
    for lesson in lessons:
        rows = slice(first, first + lesson.n_answer - 1)
        found.append(Drafted(lesson.kind, right[rows], sure[rows]))
        first += lesson.n_answer
    return found
