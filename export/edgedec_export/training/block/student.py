"""A block drafter as a student: learns blocks that begin in the answers of the target, and is measured on others.

The loss of blocks of drafts: cross entropy at first, later mostly how far the drafter's law is from the target's.

That distance, the sum of |p - q|, is twice the chance that a drawn draft is refused (DSpark trains the same). A row's
scores are products with the target's output rows, and with the Markov head's, which see the token before alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.batches import tap_scale
from edgedec_export.training.block.blocks import Blocks, Cuts, blocks_of
from edgedec_export.training.block.network import MARKOV_TABLE, new_weights, places_of, shape_of, states_of
from edgedec_export.training.block.shape import first_attention, markov_table
from edgedec_export.training.learning import Borrowed, Drafting, Student
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import ROWS_AT_ONCE, Tensor, Weights, most_probable
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.card import HeadCard

_CROSS_ENTROPY_ALONE = 0.2  # of the training: the distance's gradients are weak where the drafter knows nothing
_DISTANCE_SHARE = 0.8  # of the loss, from twice that part of the training on


@dataclass(frozen=True, slots=True, eq=False)
class Scorer:
    """What makes scores of states: the output rows beside the Markov head's.

    Attributes:
        rows: [n_vocab_draft, n_embd] of product_type, the target's output rows, which do not learn.
        markov: f32[n_vocab_draft, rank], the Markov head's.
    """

    rows: Tensor
    markov: Tensor

    def joined(self) -> Tensor:
        """Return [n_vocab_draft, n_embd + rank] of product_type, the rows side by side."""
        return torch.cat([self.rows, self.markov.detach().to(self.rows.dtype)], 1)


def distance_share(part: float) -> float:
    """Return the distance's share of the loss when so much of the training is over.

    >>> [round(distance_share(part), 2) for part in (0.1, 0.2, 0.3, 0.4, 1.0)]
    [0.0, 0.0, 0.4, 0.8, 0.8]
    """
    return _DISTANCE_SHARE * min(1.0, max(0.0, part / _CROSS_ENTROPY_ALONE - 1))


def loss_of(states: Tensor, scorer: Scorer, shares: Tensor, which: Tensor, distance: float) -> tuple[Tensor, Tensor]:
    """Return the loss of drafts, and a number whose gradient by the drafter's tensors is the loss's.

    The gradient by the scores is made at once, so that no more than a few rows of scores are kept.

    Args:
        states: f32[n, n_embd + rank], the rows' states, each beside the Markov embedding of the token before.
        scorer: The output rows.
        shares: [N, n_vocab_draft] of product_type, the target's probabilities at each place of the answers.
        which: int64[n], the place that each row foresees.
        distance: The share of the sum of |p - q| in the loss; the rest is the cross entropy's.
    """
    joined, rank = scorer.joined(), scorer.markov.shape[1]
    total, by_state, by_markov = torch.zeros((), device=states.device), [], torch.zeros_like(scorer.markov)
    with torch.no_grad():
        weight = 1 / max(1, len(which))
        pieces = (values.split(ROWS_AT_ONCE) for values in (states.to(joined.dtype), which))
        for x, index in zip(*pieces, strict=True):
            logs = F.linear(x, joined).float().log_softmax(-1)
            p = shares[index].float()
            total -= (1 - distance) * weight * (p * logs).sum()
            q = logs.exp_()
            gradient = (1 - distance) * (q - p)
            if distance:
                off = q - p
                total += 2 * distance * weight * off.abs().sum()
                signs = off.sign_()
                gradient += 2 * distance * q * (signs - (q * signs).sum(-1, keepdim=True))
            gradient = (weight * gradient).to(joined.dtype)
            by_state.append(gradient @ joined)
            by_markov += gradient.T @ x[:, -rank:]
    handle = (states * torch.cat([*by_state, states[:0]]).float()).sum() + (scorer.markov * by_markov).sum()
    return total, handle


_GOES_ON = 0.7  # of a block's rows behind the first, when learning


class BlockStudent(Student):
    """A block drafter that learns.

    Args:
        parts: The target.
        card: The drafter's card.
        token_ids: int32[n], the tokens that it can draft.
        lessons: Some lessons, for the usual size of the taps.
        seed: Of the first tensors, and of where blocks begin.
        device: "cpu" or "cuda".
    """

    n_rows = 1024

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
        self._card, self._shape, self._seed = card, shape_of(card), seed
        self._places = places_of(card, token_ids)
        embeddings = parts.embeddings(token_ids)
        weights = new_weights(card, parts.output_norm, tap_scale(lessons), embeddings.mean(axis=0), seed)
        written = np.concatenate([lesson.token_ids[lesson.n_prompt :] for lesson in lessons])
        arrays = {name: values.numpy() for name, values in weights.items()}  # of the same memory
        first_attention(card, arrays, lessons, parts.embeddings(written))
        markov_table(arrays, embeddings, card.rms_epsilon)
        super().__init__(Borrowed.of(parts, token_ids, device), weights, card.rms_epsilon, table=MARKOV_TABLE)

    def _loss(self, lessons: Sequence[Lesson], part: float) -> tuple[Tensor, Tensor]:
        draw = np.random.default_rng(list(f"{self._seed} {part}".encode()))
        can_draft = self._places < len(self._borrowed.token_ids)
        blocks = blocks_of(lessons, self._shape.size, Cuts(can_draft, draw, _GOES_ON))
        states, scorer = self._states(self.weights, blocks), self._scorer(self.weights)
        return loss_of(states, scorer, self._shares(blocks.last), self._on(blocks.which), distance_share(part))

    def _drafting(self, weights: Weights) -> Drafting:
        return partial(self._drafted, weights)

    def _drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        blocks = blocks_of(lessons, self._shape.size)
        rows = self._scorer(weights).joined()
        best, chances = most_probable(self._states(weights, blocks), rows)
        right = self._borrowed.token_ids[best] == blocks.answers[blocks.which]
        drafts = []
        for lesson, span in zip(lessons, blocks.spans, strict=True):
            at = blocks.anchors[span.rows] - lesson.n_prompt, blocks.depths[span.rows]
            shape = lesson.n_answer - 1, self._shape.size
            drafted = Drafted(lesson.kind, np.zeros(shape, np.bool_), np.zeros(shape, np.float32))
            drafted.right[at], drafted.sure[at] = right[span.rows], chances[span.rows]
            drafts.append(drafted)
        return drafts

    def _scorer(self, weights: Weights) -> Scorer:
        return Scorer(self._borrowed.rows, weights["markov_w2"])

    def _states(self, weights: Weights, blocks: Blocks) -> Tensor:
        """Return f32[R, n_embd + rank], the rows' states beside the Markov embeddings of the tokens before."""
        embeddings = self._borrowed.embeddings(blocks.before[blocks.depths == 0])
        states = states_of(self._card, weights, blocks, embeddings).float()
        return torch.cat([states, F.embedding(self._on(self._places[blocks.before]), weights[MARKOV_TABLE])], -1)
