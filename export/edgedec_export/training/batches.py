"""From lessons to batches: sequences of about one length, padded, with the rows that count in each draft step."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
from numpy.typing import NDArray

from edgedec_export.training.lessons.lesson_files import Lesson, LessonFile

_FILES_AT_ONCE = 8  # lessons of so many files are mixed


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Some lessons side by side: B lessons, T rows each, K draft steps, N tokens of answers.

    Row t holds the taps of token t. Step k reads token t + 1 + k and foresees token t + 2 + k.

    Attributes:
        token_ids: int64[B, T + 1 + K], padded with zeros.
        taps: f16[B, T, n_taps * H], padded with zeros.
        last: f16[N, H], what left the last layer where each token of an answer was chosen.
        answers: int64[N], the tokens of the answers.
        at: For each step, int64[n], the rows that count, as indices into [B * T].
        which: For each step, int64[n], which of the N tokens each of these rows foresees.
    """

    token_ids: NDArray[np.int64]
    taps: NDArray[np.float16]
    last: NDArray[np.float16]
    answers: NDArray[np.int64]
    at: tuple[NDArray[np.int64], ...]
    which: tuple[NDArray[np.int64], ...]

    def read_by(self, step: int) -> NDArray[np.int64]:
        """Return int64[B, T], the tokens that a step reads."""
        return self.token_ids[:, 1 + step : 1 + step + self.taps.shape[1]]


def batch_of(lessons: Sequence[Lesson], n_steps: int, can_draft: NDArray[np.bool_] | None = None) -> Batch:
    """Return lessons as a batch.

    Args:
        lessons: At least one.
        n_steps: K.
        can_draft: bool[n_vocab]; rows whose most probable token the head can't draft do not count. None: all count.
    """
    n_rows = max(len(lesson.token_ids) for lesson in lessons) - 1
    token_ids = np.zeros((len(lessons), n_rows + 1 + n_steps), np.int64)
    taps = np.zeros((len(lessons), n_rows, lessons[0].taps.shape[1]), np.float16)
    at: list[list[NDArray[np.int64]]] = [[] for _ in range(n_steps)]
    which: list[list[NDArray[np.int64]]] = [[] for _ in range(n_steps)]
    first = 0
    for i, lesson in enumerate(lessons):
        n, n_prompt = len(lesson.token_ids), lesson.n_prompt
        token_ids[i, :n] = lesson.token_ids
        taps[i, : n - 1] = lesson.taps
        counts = np.ones(lesson.n_answer, np.bool_) if can_draft is None else can_draft[lesson.best]
        for k in range(n_steps):
            foreseen = np.flatnonzero(counts[k + 1 :]) + k + 1  # the answer's first token is nobody's to foresee
            at[k].append(i * n_rows + foreseen + n_prompt - 2 - k)
            which[k].append(first + foreseen)
        first += lesson.n_answer
    return Batch(
        token_ids,
        taps,
        np.concatenate([lesson.last for lesson in lessons]),
        np.concatenate([lesson.token_ids[lesson.n_prompt :] for lesson in lessons]).astype(np.int64),
        tuple(np.concatenate(rows) for rows in at),
        tuple(np.concatenate(rows) for rows in which),
    )


def grouped_by_length(lessons: Iterable[Lesson], n_rows: int) -> list[list[Lesson]]:
    """Return lessons in groups of similar length, each with at most `n_rows` rows (or one lesson), padding included."""
    groups: list[list[Lesson]] = []
    for lesson in sorted(lessons, key=lambda lesson: len(lesson.token_ids)):
        if not groups or (len(groups[-1]) + 1) * len(lesson.token_ids) > n_rows:
            groups.append([])
        groups[-1].append(lesson)
    return groups


@dataclass(frozen=True, slots=True, order=True)
class LessonPlace:
    """Where a training stands in the lessons.

    Attributes:
        n_pass: Times that all files were read.
        n_mix: Mixes of files read in this pass.
        n_group: Groups of lessons learned from in this mix.
    """

    n_pass: int = 0
    n_mix: int = 0
    n_group: int = 0


def endless_groups(
    files: Sequence[LessonFile], n_rows: int, seed: int, begin: LessonPlace
) -> Iterator[tuple[LessonPlace, list[Lesson]]]:
    """Yield lessons in groups of similar length, pass after pass, each in another order, and the place after each.

    Args:
        files: The files; at least one with a lesson.
        n_rows: As in grouped_by_length.
        seed: Another seed gives another order.
        begin: Where to begin: what comes is what came after this place before.

    Raises:
        ModelFormatError: A file was damaged.
    """
    n_pass, n_mix, n_group = begin.n_pass, begin.n_mix, begin.n_group
    while True:
        order = Random(f"{seed} {n_pass}").sample(list(files), len(files))
        mixes = [order[i : i + _FILES_AT_ONCE] for i in range(0, len(order), _FILES_AT_ONCE)]
        for mix in mixes[n_mix:]:
            lessons = [lesson for file in mix for lesson in file.read() if lesson.n_answer > 1]
            groups = grouped_by_length(lessons, n_rows)
            groups = Random(f"{seed} {n_pass} {n_mix}").sample(groups, len(groups))
            for group in groups[n_group:]:
                n_group += 1
                yield LessonPlace(n_pass, n_mix, n_group), group
            n_mix, n_group = n_mix + 1, 0
        n_pass, n_mix = n_pass + 1, 0


def tap_scale(lessons: Sequence[Lesson]) -> NDArray[np.float32]:
    """Return float32[n_taps * H], the root of the mean square of each element of the taps in the lessons' answers.

    The prompts are left out: the first token of a text has hidden states of a size that no other token has.
    """
    squares = [np.square(lesson.taps[lesson.n_prompt :].astype(np.float32)) for lesson in lessons]
    mean = np.concatenate(squares).mean(axis=0)
    scale: NDArray[np.float32] = np.sqrt(np.maximum(mean, 1e-12)).astype(np.float32)
    return scale
