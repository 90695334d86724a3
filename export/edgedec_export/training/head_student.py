"""A head as a student: what the training of any drafter asks of it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_export.training.batches import batch_of, tap_scale
from edgedec_export.training.foresight import drafted_on
from edgedec_export.training.learning import DRAFT_STEPS, Borrowed, Learner
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Weights, new_weights
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
