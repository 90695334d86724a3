"""Narrow draft models as students of the comparison: with cross entropy, with TVD++, and with several exits (S2D).

The model is that of `edgedec train-drafter --kind model`, but it tells the tokens of the short list apart, and drafts
these: a narrow model's output matrix is most of what it reads.

- TVD++ (arXiv:2403.00858) rewards a token where the target gives it more than the draft model, and divides that reward,
  less its mean, by its spread. In the mean over the draft model's own distribution the mean falls out, so the gradient
  is that of the total variation distance, times a number. It comes after a fifth of the training by cross entropy, as
  the paper's comes after a pre-training.
- S2D (arXiv:2407.01955) trains the exits after some of the layers together. A token is looked for at the first exit,
  and at the next where that is not sure enough.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from relatives_costs import BYTES_PER_WEIGHT, ByExits
from relatives_learning import embeddings_of

from edgedec_export.training.arithmetic import in_product_type
from edgedec_export.training.batches import grouped_by_length
from edgedec_export.training.kinds import bytes_per_step
from edgedec_export.training.learning import Borrowed
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.narrow.initial import initial_weights
from edgedec_export.training.narrow.shape import shape_of
from edgedec_export.training.narrow.student import NarrowStudent, Texts, drafts_of, exit_states
from edgedec_export.training.network import Tensor, Weights, cross_entropy, most_probable, target_shares
from edgedec_export.training.optimizing import Optimizers
from edgedec_export.training.simulation import Drafted

Loss = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Takes what cross_entropy takes, and returns a loss and its gradient by the outputs."""

_RATE = 1e-3  # as in `edgedec train-drafter --kind model`
_LEARNED_ROWS, _ROWS = 512, 4096
_ENTROPY_PART = 0.2  # of the training by cross entropy, before another loss
_ROWS_AT_ONCE = 256


class Narrow:
    """Implements the study's Method for a narrow draft model.

    Args:
        borrowed: The target's output rows of the short list.
        lessons: Returns some lessons, to which a new model's output is fitted.
        exits: After how many layers a token can be drafted, ascending; the last is the number of layers.
        loss: What it learns by after the first part of the training.
    """

    def __init__(
        self,
        borrowed: Borrowed,
        lessons: Callable[[], Sequence[Lesson]],
        exits: Sequence[int],
        loss: Loss = cross_entropy,
    ) -> None:
        self._borrowed, self._lessons, self._exits, self._loss = borrowed, lessons, exits, loss
        self._shape = shape_of(borrowed.parts.network, exits[-1])
        weights = initial_weights(borrowed.parts, self._shape, lessons(), 0)
        self._student = NarrowStudent(borrowed.parts, self._shape, weights, borrowed.token_ids, "cpu")
        self.weights = self._student.weights
        self._optimizers, self._is_fitted = Optimizers(self.weights, _RATE, _RATE), False

    def learn(self, lessons: Sequence[Lesson], part: float) -> float:
        """Learn from lessons and return the loss, in nats; `part` of the training is over, 0 to 1."""
        if not self._is_fitted:
            self._student.fit_output(self._lessons())
            self._is_fitted = True
        groups = grouped_by_length(lessons, _LEARNED_ROWS)
        return float(np.mean([self._learn(group, part) for group in groups]))

    def _learn(self, lessons: Sequence[Lesson], part: float) -> float:
        b, texts = self._borrowed, Texts.of(lessons)
        with torch.no_grad():
            shares = target_shares(torch.from_numpy(texts.last), b.norm, b.rows, self._shape.rms_epsilon)
        best = np.concatenate([lesson.best for lesson in lessons])
        counts = torch.from_numpy(np.flatnonzero(np.isin(best, b.token_ids)))
        loss = cross_entropy if part < _ENTROPY_PART else self._loss
        total, handle = 0.0, torch.zeros(())
        with in_product_type("cpu"):
            for outputs in self._outputs(texts):
                found, gradient = loss(outputs[counts].detach(), shares, counts, b.rows)
                total += float(found) / len(self._exits)
                handle = handle + (outputs[counts].float() * gradient).sum() / len(self._exits)
        self._optimizers.descend(handle, part)
        return total

    def _outputs(self, texts: Texts) -> list[Tensor]:
        """Return for each exit [N, target's width], whose products with the target's output rows are the logits."""
        embeddings = embeddings_of(self._borrowed.parts, texts.token_ids)
        at = torch.from_numpy(texts.at)
        found = exit_states(self._shape, self.weights, embeddings, self._exits)
        return [F.linear(states.flatten(0, 1)[at], self.weights["leave"]) for states in found]

    def drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what each exit drafts after each token of each lesson's answer, one exit's columns after the other's.

        Args:
            weights: The model's own tensors.
            lessons: The lessons; those of one token are left out.
        """
        assert weights is self.weights, "a draft model of this study is measured as it is"
        found: list[Drafted] = []
        with torch.no_grad(), in_product_type("cpu"):
            for group in grouped_by_length([lesson for lesson in lessons if lesson.n_answer > 1], _ROWS):
                exits = [self._at_exit(group, outputs) for outputs in self._outputs(Texts.of(group))]
                for texts in zip(*exits, strict=True):
                    right, sure = (
                        np.concatenate(parts, 1)
                        for parts in ([text.right for text in texts], [text.sure for text in texts])
                    )
                    found.append(Drafted(texts[0].kind, right, sure))
        return found

    def _at_exit(self, lessons: Sequence[Lesson], outputs: Tensor) -> list[Drafted]:
        places, sure = most_probable(outputs, self._borrowed.rows)
        tokens: NDArray[np.int64] = self._borrowed.token_ids[places].astype(np.int64)
        ends = np.cumsum([lesson.n_answer for lesson in lessons])[:-1]
        parts = zip(lessons, np.split(tokens, ends), np.split(sure, ends), strict=True)
        return [drafts_of(lesson, best, chances) for lesson, best, chances in parts]

    def state(self) -> dict[str, Any]:
        """Return all that changes, for restore()."""
        return self._optimizers.state()

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""
        self._optimizers.restore(state)
        self._is_fitted = True


def narrow_price(borrowed: Borrowed, exits: Sequence[int]) -> ByExits:
    """Return what drafts cost: the layers up to an exit, and the output rows, narrow ones, at each exit tried."""
    shape = shape_of(borrowed.parts.network, exits[-1])
    layer, rows = shape.n_layer_weights / shape.n_layer, len(borrowed.token_ids) * shape.n_embd
    bytes_read = [BYTES_PER_WEIGHT * (n * layer + (i + 1) * rows) for i, n in enumerate(exits)]
    return ByExits(tuple(bytes_read), bytes_per_step(borrowed.parts))


def variation(outputs: Tensor, shares: Tensor, which: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean total variation distance of drafts from the target, and TVD++'s gradient by `outputs`.

    The reward of a token is 1 where the target gives it more than the draft model does. Its mean and its spread are
    taken over the tokens of some 256 rows.

    Args:
        outputs: As for cross_entropy, like the rest.
        shares: The target's probabilities.
        which: The row of `shares` that each output is to foresee.
        rows: The output rows.
    """
    total, gradients, n = torch.zeros(()), [], max(1, len(which))
    with torch.no_grad():
        for y, index in zip(outputs.split(_ROWS_AT_ONCE), which.split(_ROWS_AT_ONCE), strict=True):
            q, p = F.linear(y.to(rows.dtype), rows).float().softmax(-1), shares[index].float()
            reward = (p > q).float()
            advantage = (reward - reward.mean()) / reward.std().clamp_min(1e-3)
            total += 0.5 * (p - q).abs().sum()
            expected = (q * advantage).sum(-1, keepdim=True)
            gradients.append((q * (expected - advantage)).to(rows.dtype) @ rows)
    return total / n, torch.cat(gradients).float() / n
