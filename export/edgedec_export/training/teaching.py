"""The training of a drafter on lessons: batches in turn, measured on those held back, resumable at any moment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgedec.errors import RequestError, argument
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec_export.training import checkpoints
from edgedec_export.training.batches import LessonPlace, endless_groups
from edgedec_export.training.checkpoints import Progressed
from edgedec_export.training.kinds import Kind
from edgedec_export.training.learning import Student
from edgedec_export.training.lessons.lesson_files import Lesson, LessonFile
from edgedec_export.training.network import Weights
from edgedec_export.training.report import MOST_DRAFTED
from edgedec_export.training.simulation import Drafted, replay
from edgedec_runtimes.trained_heads.head import Head

_PATIENCE = 5  # measurements without a rise after which the training ends
_MOST_HELD_BACK = 48_000_000  # numbers of taps: lessons held back beyond that are left out
_GOES_ON = 0.7  # of a training: from there on, with its low rates, a head that has learned goes on
_PHASE = "training"


@dataclass(frozen=True, slots=True)
class Teaching:
    """How a drafter is trained.

    Attributes:
        checkpoint: The file of checkpoints.
        key: What identifies target, recipe and drafter; a checkpoint with another key is refused.
        n_passes: How often the drafter learns from every answer.
        seed: Of random numbers.
        save_every_s: Seconds between two checkpoints.
        first: The head that goes on learning; None for a new drafter.
    """

    checkpoint: Path
    key: str
    n_passes: float = 3.0
    seed: int = 0
    save_every_s: float = 60.0
    first: Head | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """A drafter that was trained.

    Attributes:
        weights: Its tensors when it was best.
        token_ids: int32[n], the tokens to draft with.
        history: Each time it was measured: the tokens seen, and the tokens that a step adds.
        drafted: What it drafts on the answers held back.
    """

    weights: Weights
    token_ids: NDArray[np.int32]
    history: list[tuple[int, float]]
    drafted: list[Drafted]


def teach(
    kind: Kind,
    files: Sequence[LessonFile],
    short_list: Callable[[], NDArray[np.int32]],
    job: Teaching,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Taught:
    """Train a drafter, or go on where an earlier run stopped, and return the best one found.

    Args:
        kind: What is trained.
        files: The lessons.
        short_list: Returns the tokens that a new drafter drafts with; not called where a checkpoint names them.
        job: How to train.
        on_progress: Called with the tokens seen.
        cancel: Ends the training; a checkpoint is written first.

    Raises:
        RequestError: There are no lessons, or the checkpoint is another recipe's.
        ModelFormatError: A file is damaged.
        CancelledError: `cancel` was cancelled.
        OSError: A checkpoint can't be written.
    """
    train = [file for file in files if not file.is_held_back and file.n_tokens]
    held = _held_back(files)
    if not train or not held:
        raise RequestError(
            f"there are too few answers to train on and to measure with; collect more ({argument('n_tokens')})"
        )
    state = checkpoints.restore(job.checkpoint, job.key) or Progressed(short_list(), LessonPlace(), 0, [])
    student = kind.new_student(state.token_ids, train, seed=job.seed, device=default_device())
    if state.learner is not None:
        student.restore(state.learner)
    elif job.first is not None:
        student.begin(job.first)
    _Trainer(kind, student, state, train, held, job).run(on_progress, cancel)
    assert state.best is not None, "a training that is over has measured the drafter"
    return Taught(state.best, state.token_ids, state.history, student.drafted(state.best, held))


class _Trainer:
    """A training under way."""

    def __init__(
        self,
        kind: Kind,
        student: Student,
        state: Progressed,
        train: Sequence[LessonFile],
        held: Sequence[Lesson],
        job: Teaching,
    ) -> None:
        self._kind, self._student, self._state, self._job = kind, student, state, job
        self._train, self._held = train, held
        self._n_in_all = int(sum(file.n_tokens for file in train) * job.n_passes)

    def run(self, on_progress: OnProgress | None, cancel: CancelToken | None) -> None:
        """Learn until all passes are done, or the drafter no longer gets better."""
        state, saved_at = self._state, monotonic()
        groups = endless_groups(self._train, self._kind.n_rows, self._job.seed, state.place)
        begin = 0.0 if self._job.first is None else _GOES_ON
        try:
            if begin and not state.history:
                self._measure()
            while not self._is_over():
                if cancel is not None:
                    cancel.check(_PHASE)
                place, lessons = next(groups)
                self._student.learn(lessons, begin + (1 - begin) * state.n_seen / self._n_in_all)
                state.place, state.n_seen = place, state.n_seen + sum(lesson.n_answer for lesson in lessons)
                report_progress(on_progress, _PHASE, min(state.n_seen, self._n_in_all - 1), self._n_in_all, "tokens")
                if self._is_measured_now():
                    self._measure()
                if monotonic() - saved_at >= self._job.save_every_s:
                    self._save()
                    saved_at = monotonic()
        finally:
            self._save()
        report_progress(on_progress, _PHASE, self._n_in_all, self._n_in_all, "tokens")

    def _is_over(self) -> bool:
        gains = [gain for _, gain in self._state.history]
        waited = len(gains) - 1 - gains.index(max(gains)) if gains else 0
        return bool(gains) and (self._state.n_seen >= self._n_in_all or waited >= _PATIENCE)

    def _is_measured_now(self) -> bool:
        seen, every = self._state.n_seen, max(1, self._n_in_all // self._kind.n_measurements)
        last = self._state.history[-1][0] if self._state.history else 0
        return seen // every > last // every or seen >= self._n_in_all

    def _measure(self) -> None:
        """Measure the drafter on the answers held back, and keep it where it is the best so far."""
        state = self._state
        weights = {name: values.detach().clone() for name, values in self._student.weights.items()}
        drafted = self._student.drafted(weights, self._held[: self._kind.n_measured])
        gain = replay(drafted, lambda n: 1.0, MOST_DRAFTED).tokens_per_step
        if gain > state.best_yield:
            state.best = weights
        state.history.append((state.n_seen, gain))

    def _save(self) -> None:
        state = self._state
        state.learner = self._student.state()
        checkpoints.save(self._job.checkpoint, self._job.key, state)


def _held_back(files: Sequence[LessonFile]) -> list[Lesson]:
    """Return the greedy lessons held back, whose prompts no lesson to learn from has.

    A draft is right there where it is the target's most probable token.
    """
    learned = {digest for file in files if not file.is_held_back for digest in file.prompt_hashes()}
    held_back: list[Lesson] = []
    size = 0
    for file in files:
        if file.is_held_back and size < _MOST_HELD_BACK:
            greedy = [lesson for lesson in file.read() if lesson.temperature == 0 and lesson.n_answer > 1]
            lessons = [lesson for lesson in greedy if lesson.prompt_hash not in learned]
            size += sum(lesson.taps.size for lesson in lessons)
            held_back += lessons
    return held_back


def default_device() -> str:
    """Return "cuda" where torch finds such a device, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_threads(n_threads: int | None) -> Any:
    """Let torch use so many threads; None leaves it its own number."""
    if n_threads is not None:
        torch.set_num_threads(n_threads)
