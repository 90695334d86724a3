"""A head as a student: a batch goes through several draft steps, each of which reads what the one before gave."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.batches import Batch, batch_of, tap_scale
from edgedec_export.training.learning import Borrowed, Drafting, Student
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Tensor, Unroll, Weights, loss_of, new_weights
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import HeadCard

DRAFT_STEPS = 4
"""Draft steps that training unrolls."""


def embeddings_by_step(borrowed: Borrowed, batch: Batch, n_steps: int) -> list[Tensor]:
    """Return for each draft step the embeddings of the tokens that the step reads, f32[B, T, n_embd]."""
    every, n_rows = borrowed.embeddings(batch.token_ids), batch.taps.shape[1]
    return [every[:, 1 + k : 1 + k + n_rows] for k in range(n_steps)]


class HeadStudent(Student):
    """A head that learns.

    Args:
        parts: The target.
        card: The head's card.
        token_ids: int32[n], the tokens that it can draft.
        lessons: Some lessons, for the usual size of the taps.
        seed: Of the first tensors.
        device: "cpu" or "cuda".
    """

    def __init__(
        self,
        parts: TargetParts,
        card: HeadCard,
        token_ids: NDArray[np.int32],
        lessons: Sequence[Lesson],
        *,
        seed: int,
        device: str,
    ) -> None:
        weights = new_weights(card, parts.output_norm, tap_scale(lessons), seed)
        super().__init__(Borrowed.of(parts, token_ids, device), weights, card.rms_epsilon)
        self._card = card
        self._can_draft = np.zeros(card.n_vocab_target, np.bool_)
        self._can_draft[token_ids] = True

    def _loss(self, lessons: Sequence[Lesson], part: float) -> tuple[Tensor, Tensor]:
        b, batch = self._borrowed, batch_of(lessons, DRAFT_STEPS, self._can_draft)
        head = {"rows": b.rows, "shares": self._shares(batch.last)}
        counted = [(self._on(at), self._on(which)) for at, which in zip(batch.at, batch.which, strict=True)]
        unroll = Unroll.begin(self._card, self.weights, self._on(batch.taps).float())
        return loss_of(unroll, embeddings_by_step(b, batch, DRAFT_STEPS), counted, head)

    def _drafting(self, weights: Weights) -> Drafting:
        return partial(self._drafted, weights)

    def _drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        b, batch = self._borrowed, batch_of(lessons, MOST_DRAFTED)
        shape = len(lessons), batch.taps.shape[1], MOST_DRAFTED
        right, sure = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        unroll = Unroll.begin(self._card, weights, self._on(batch.taps).float())
        for k, embeddings in enumerate(embeddings_by_step(b, batch, MOST_DRAFTED)):
            at = batch.at[k]
            outputs = unroll.step(embeddings).flatten(0, 1)[self._on(at)]
            shares = F.linear(outputs.to(b.rows.dtype), b.rows).float().softmax(-1)
            best, place = shares.max(-1)
            drafted = b.token_ids[place.cpu().numpy()]
            right.reshape(-1, MOST_DRAFTED)[at, k] = drafted == batch.answers[batch.which[k]]
            sure.reshape(-1, MOST_DRAFTED)[at, k] = best.float().cpu().numpy()
        return [_of(lesson, right[i], sure[i]) for i, lesson in enumerate(lessons)]


def _of(lesson: Lesson, right: NDArray[np.bool_], sure: NDArray[np.float32]) -> Drafted:
    """Return the rows at which a draft may begin: those of the answer but the last token."""
    begin, n = lesson.n_prompt - 1, lesson.n_answer - 1
    return Drafted(lesson.kind, right[begin : begin + n], sure[begin : begin + n])
