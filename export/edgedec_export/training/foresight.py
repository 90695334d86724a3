"""What a head drafts on texts that it did not learn from: for each row and step whether it is right, and how sure."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from edgedec_export.training.arithmetic import in_product_type
from edgedec_export.training.batches import batch_of, grouped_by_length
from edgedec_export.training.learning import Borrowed
from edgedec_export.training.lessons.lesson_files import Lesson
from edgedec_export.training.network import Unroll, Weights
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import Drafted
from edgedec_runtimes.trained_heads.card import HeadCard

_ROWS = 4096


def drafted_on(card: HeadCard, weights: Weights, borrowed: Borrowed, lessons: Sequence[Lesson]) -> list[Drafted]:
    """Return what a head drafts after each token of each lesson's answer; lessons of a single token are left out."""
    found: list[Drafted] = []
    with torch.no_grad(), in_product_type(borrowed.device):
        for group in grouped_by_length([lesson for lesson in lessons if lesson.n_answer > 1], _ROWS):
            found += _drafted(card, weights, borrowed, group)
    return found


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
