"""A head as a student: what the training of any drafter asks of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.arithmetic import in_product_type
from edgedec_export.training.batches import batch_of, grouped_by_length, tap_scale
from edgedec_export.training.learning import DRAFT_STEPS, Borrowed, Learner
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Unroll, Weights, new_weights
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import HeadCard


class HeadStudent:
    """Implements edgedec_export.training.teaching.Student for a head.

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
        self._card = card
        self._borrowed = Borrowed.of(parts, token_ids, device)
        weights = new_weights(self._card, parts.output_norm, tap_scale(lessons), seed)
        self._learner = Learner(self._card, weights, self._borrowed)
        self._can_draft = np.zeros(self._card.n_vocab_target, np.bool_)
        self._can_draft[token_ids] = True

    @property
    def weights(self) -> Weights:
        """The head's tensors."""
        return self._learner.weights

    def learn(self, lessons: Sequence[Lesson], part: float) -> float:
        """Learn from lessons and return the loss, in nats; `part` of the training is over."""
        return self._learner.learn(batch_of(lessons, DRAFT_STEPS, self._can_draft), part)

    def drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what a head with these tensors drafts on lessons."""
        on_device = {name: values.to(self._borrowed.device) for name, values in weights.items()}
        return drafted_on(self._card, on_device, self._borrowed, lessons)

    def state(self) -> dict[str, Any]:
        """Return all that changes, for restore()."""
        return self._learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        self._learner.restore(state)


_ROWS = 4096


def drafted_on(card: HeadCard, weights: Weights, borrowed: Borrowed, lessons: Sequence[Lesson]) -> list[Drafted]:
    """Return what a head drafts after each token of each lesson's answer; lessons of a single token are left out."""
    drafts: list[Drafted] = []
    with torch.no_grad(), in_product_type(borrowed.device):
        for group in grouped_by_length([lesson for lesson in lessons if lesson.n_answer > 1], _ROWS):
            drafts += _drafted(card, weights, borrowed, group)
    return drafts


def _drafted(card: HeadCard, weights: Weights, borrowed: Borrowed, lessons: Sequence[Lesson]) -> list[Drafted]:
    batch = batch_of(lessons, MOST_DRAFTED)
    shape = len(lessons), batch.taps.shape[1], MOST_DRAFTED
    right, sure = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
    unroll = Unroll.begin(card, weights, torch.from_numpy(batch.taps).to(borrowed.device).float())
    for k, embeddings in enumerate(borrowed.embeddings(batch, MOST_DRAFTED)):
        at = batch.at[k]
        outputs = unroll.step(embeddings).flatten(0, 1)[torch.from_numpy(at).to(borrowed.device)]
        shares = F.linear(outputs.to(borrowed.rows.dtype), borrowed.rows).float().softmax(-1)
        best, place = shares.max(-1)
        drafted = borrowed.token_ids[place.cpu().numpy()]
        right.reshape(-1, MOST_DRAFTED)[at, k] = drafted == batch.answers[batch.which[k]]
        sure.reshape(-1, MOST_DRAFTED)[at, k] = best.float().cpu().numpy()
    return [_of(lesson, right[i], sure[i]) for i, lesson in enumerate(lessons)]


def _of(lesson: Lesson, right: NDArray[np.bool_], sure: NDArray[np.float32]) -> Drafted:
    """Return the rows at which a draft may begin: those of the answer but the last token."""
    begin, n = lesson.n_prompt - 1, lesson.n_answer - 1
    return Drafted(lesson.kind, right[begin : begin + n], sure[begin : begin + n])
