"""From lessons to blocks: one begins at each token of an answer; what its rows read, and what they are to foresee."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec_export.training.lessons.lesson_files import Lesson


@dataclass(frozen=True, slots=True)
class Span:
    """What belongs to one lesson.

    Attributes:
        context: Its rows of context, as a slice of all.
        rows: Its blocks' rows, as a slice of all.
    """

    context: slice
    rows: slice


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Blocks in some lessons: R rows of blocks one after another, C rows of context, N tokens of answers.

    Row k of the block with anchor a stands at position a + k of its text. It sees the context before a, and the rows of
    its block up to itself, and is to foresee token a + k + 1.

    Attributes:
        spans: For each lesson its part of the others.
        taps: f16[C, n_taps * H].
        positions: int64[C], each context row's place in its text.
        anchors: int64[R], the position of the first row of each row's block.
        depths: int64[R], each row's k.
        before: int64[R], the token before the one to foresee; that of a first row is the anchor's.
        last: f16[N, H], what left the last layer where each token of an answer was chosen.
        answers: int64[N], the tokens of the answers.
        which: int64[R], which of the N tokens each row foresees.
    """

    spans: tuple[Span, ...]
    taps: NDArray[np.float16]
    positions: NDArray[np.int64]
    anchors: NDArray[np.int64]
    depths: NDArray[np.int64]
    before: NDArray[np.int64]
    last: NDArray[np.float16]
    answers: NDArray[np.int64]
    which: NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Cuts:
    """How blocks are shortened to learn from.

    Attributes:
        can_draft: bool[n_vocab]; a block ends before a row whose most probable token the drafter can't draft, as no
            draft gets past it.
        draw: Where lengths come from.
        goes_on: The chance that a block goes on behind a row: the rows of long drafts count less, and cost less.
    """

    can_draft: NDArray[np.bool_]
    draw: np.random.Generator
    goes_on: float


def blocks_of(lessons: Sequence[Lesson], size: int, cuts: Cuts | None = None) -> Blocks:
    """Return blocks of at most `size` rows in lessons of at least two tokens of answer each; None cuts no block."""
    spans, parts = [], []
    n_context = n_rows = n_answers = 0
    for lesson in lessons:
        places = np.arange(lesson.n_answer - 1)[:, None]  # of the anchors, in the answer
        depths = np.arange(size)
        there = places + depths < lesson.n_answer - 1
        if cuts is not None:
            foreseen = np.where(there, places + depths + 1, 0)
            drafted = cuts.can_draft[lesson.best[foreseen]] & (
                depths < cuts.draw.geometric(1 - cuts.goes_on, places.shape)
            )
            there = np.logical_and.accumulate(there & drafted, axis=1)
        place, depth = np.nonzero(there)
        before = lesson.token_ids[lesson.n_prompt + place + depth]
        parts.append((lesson.n_prompt + place, depth, before, n_answers + place + depth + 1))
        context = slice(n_context, n_context + len(lesson.taps))
        spans.append(Span(context, slice(n_rows, n_rows + len(place))))
        n_context, n_rows, n_answers = context.stop, n_rows + len(place), n_answers + lesson.n_answer
    anchors, depth, before, which = (np.concatenate(part).astype(np.int64) for part in zip(*parts, strict=True))
    return Blocks(
        tuple(spans),
        np.concatenate([lesson.taps for lesson in lessons]),
        np.concatenate([np.arange(len(lesson.taps)) for lesson in lessons]),
        anchors,
        depth,
        before,
        np.concatenate([lesson.last for lesson in lessons]),
        np.concatenate([lesson.token_ids[lesson.n_prompt :] for lesson in lessons]).astype(np.int64),
        which,
    )
