"""Medusa and Hydra heads in torch: their tensors, what they draft, and how they learn.

Both draft from what left the target's last layer at the newest token whose forward is done, position t; the target
itself chooses token t + 1 there. Medusa's head k (arXiv:2401.10774) foresees token t + 2 + k from that state alone.
Hydra's head k (arXiv:2402.05109) reads the embeddings of tokens t + 1 to t + 1 + k beside it. A head returns
y = C z + SiLU(A z), where z joins the state and what is read. In Medusa's paper C is the identity, and every head has
an output matrix that learns; here both kinds share the target's own rows of the tokens that can be drafted, as EAGLE-3
heads do, and each head has a norm of its own before them. With C fixed, Medusa's heads did worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.batches import Batch, batch_of, grouped_by_length
from edgedec_export.training.learning import Borrowed
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Tensor, Weights, cross_entropy, target_shares
from edgedec_export.training.optimizing import Optimizers
from edgedec_export.training.simulation import Drafted

N_HEADS = 6

_MATRIX_RATES = {False: 2e-2, True: 8e-3}  # by whether heads read drafts; chosen after 20,000 tokens
_VECTOR_RATE = 5e-3
_STEP_WEIGHT = 0.8  # of each further head in the loss, as in Medusa's and in EAGLE-3's
_FIRST_OUTPUT = 0.3  # of the target's output norm
_ROWS = 4096


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What kind of heads these are.

    Attributes:
        n_embd: Length of the target's hidden state.
        reads_drafts: Each head reads the tokens before the one that it foresees: Hydra's heads do, Medusa's don't.
        n_heads: How many heads: the most tokens of a draft.
    """

    n_embd: int
    reads_drafts: bool
    n_heads: int = N_HEADS

    def n_read(self, head: int) -> int:
        """Return how many tokens a head reads."""
        return head + 1 if self.reads_drafts else 0

    def n_weights(self, head: int) -> int:
        """Return the numbers of a head's matrices."""
        return 2 * self.n_embd * self.n_embd * (1 + self.n_read(head))


def new_heads(shape: HeadShape, output_norm: Any, seed: int) -> Weights:
    """Return heads that have learned nothing: each passes the target's state on, so it foresees token t + 1.

    Args:
        shape: The heads.
        output_norm: float32[n_embd], the weights of the target's last norm.
        seed: Of the random numbers.
    """
    draw, n = torch.Generator().manual_seed(seed), shape.n_embd
    weights: Weights = {}
    for k in range(shape.n_heads):
        n_in = n * (1 + shape.n_read(k))
        weights[f"inner{k}"] = torch.randn(n, n_in, generator=draw) * (0.2 / math.sqrt(n_in))
        weights[f"through{k}"] = torch.randn(n, n_in, generator=draw) * (0.2 / math.sqrt(n_in))
        weights[f"through{k}"][:, :n] += torch.eye(n)
        weights[f"norm{k}"] = torch.from_numpy(_FIRST_OUTPUT * np.asarray(output_norm, np.float32))
    return weights


def head_output(weights: Weights, head: int, state: Tensor, embeddings: Sequence[Tensor]) -> Tensor:
    """Return [n, n_embd], what the output rows turn into logits, of one head.

    Args:
        weights: What new_heads returned, and learning changed.
        head: Which head, from 0.
        state: [n, n_embd], the target's states of the newest evaluated token, normed by `unit`.
        embeddings: Of the tokens that this head reads, in their order; none for Medusa's heads.
    """
    x = torch.cat([state, *embeddings], -1)
    y = F.linear(x, weights[f"through{head}"]) + F.silu(F.linear(x, weights[f"inner{head}"]))
    return unit(y) * weights[f"norm{head}"]


def unit(x: Tensor) -> Tensor:
    """Return x divided by the root of the mean square of its last axis, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)


class HeadLearner:
    """Medusa or Hydra heads that learn. Matrices are updated by Muon, vectors by AdamW, as EAGLE-3 heads are.

    Attributes:
        shape: The heads.
        weights: Their tensors, which every step changes.
    """

    def __init__(self, shape: HeadShape, borrowed: Borrowed, epsilon: float, seed: int = 0) -> None:
        self.shape, self._borrowed, self._epsilon = shape, borrowed, epsilon
        self.weights = {
            name: values.requires_grad_() for name, values in new_heads(shape, borrowed.parts.output_norm, seed).items()
        }
        self._optimizers = Optimizers(self.weights, _MATRIX_RATES[shape.reads_drafts], _VECTOR_RATE)

    def learn(self, batch: Batch, part: float) -> float:
        """Learn from a batch and return its loss, in nats.

        Args:
            batch: What to learn from, with a draft step for each head.
            part: How much of the training is over, 0 to 1: the rate falls with a cosine.
        """
        b = self._borrowed
        last = torch.from_numpy(batch.last)
        with torch.no_grad():
            shares = target_shares(last, b.norm, b.rows, self._epsilon)
        loss, handle = 0.0, torch.zeros(())
        with torch.autocast("cpu", torch.bfloat16):
            for k, outputs in enumerate(self.outputs(batch)):
                which = torch.from_numpy(batch.which[k])
                found, gradient = cross_entropy(outputs.detach(), shares, which, b.rows)
                loss += _STEP_WEIGHT**k * float(found)
                handle = handle + _STEP_WEIGHT**k * (outputs.float() * gradient).sum()
        self._optimizers.descend(handle, part)
        return loss

    def outputs(self, batch: Batch) -> list[Tensor]:
        """Return for each head [n, n_embd], for the tokens `batch.which` of that head."""
        known, places = np.unique(batch.answers, return_inverse=True)
        table = unit(torch.from_numpy(self._borrowed.parts.embeddings(known)))
        state = unit(torch.from_numpy(batch.last))
        found = []
        for k in range(self.shape.n_heads):
            which, n_read = batch.which[k], self.shape.n_read(k)
            read = [table[torch.from_numpy(places[which - n_read + i])] for i in range(n_read)]
            found.append(head_output(self.weights, k, state[torch.from_numpy(which - k - 1)], read))
        return found

    def drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what the heads draft after each token of each lesson's answer; lessons of one token are left out."""
        found: list[Drafted] = []
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            for group in grouped_by_length([lesson for lesson in lessons if lesson.n_answer > 1], _ROWS):
                found += self._drafted(group)
        return found

    def _drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        batch, rows = batch_of(lessons, self.shape.n_heads), self._borrowed.rows
        shape = len(batch.answers), self.shape.n_heads
        right, sure = np.zeros(shape, np.bool_), np.zeros(shape, np.float32)
        for k, outputs in enumerate(self.outputs(batch)):
            best, place = F.linear(outputs.to(rows.dtype), rows).float().softmax(-1).max(-1)
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
