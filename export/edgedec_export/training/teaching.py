"""The training of a head on lessons: batches in turn, measured on those held back, resumable at any moment."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.trained_heads.card import HeadCard
from edgedec_export.training import checkpoints
from edgedec_export.training.batches import Place, batch_of, endless_groups, tap_scale
from edgedec_export.training.checkpoints import Progressed
from edgedec_export.training.foresight import MOST_DRAFTED, drafted_on
from edgedec_export.training.learning import DRAFT_STEPS, Borrowed, Learner
from edgedec_export.training.lessons import Lesson, LessonFile
from edgedec_export.training.network import Weights, folded, new_weights
from edgedec_export.training.simulation import Drafted, replay
from edgedec_export.training.target_parts import TargetParts

_MEASUREMENTS = 16  # of a whole training
_PATIENCE = 5  # measurements without a rise after which the training ends
_MOST_HELD_BACK = 48_000_000  # numbers of taps: lessons held back beyond that are left out
_PHASE = "training"


@dataclass(frozen=True, slots=True)
class Teaching:
    """How a head is trained.

    Attributes:
        folder: Where checkpoints are kept.
        key: What identifies target and recipe; a checkpoint with another key is refused.
        n_passes: How often the head learns from every answer.
        n_rows: Rows of a batch, padding included.
        seed: Of the first tensors and of the order of lessons.
        device: "cpu" or "cuda".
        save_every_s: Seconds between two checkpoints.
    """

    folder: Path
    key: str
    n_passes: float = 3.0
    n_rows: int = 2048
    seed: int = 0
    device: str = "cpu"
    save_every_s: float = 60.0


@dataclass(frozen=True, slots=True, eq=False)
class Taught:
    """A trained head.

    Attributes:
        arrays: float32 arrays by the names of edgedec.trained_heads.head.
        token_ids: int32[n_vocab_draft], the tokens that it can draft.
        history: Each time it was measured: the tokens seen, and the tokens that a step adds.
        drafted: What it drafts on the answers held back.
    """

    arrays: dict[str, NDArray[np.float32]]
    token_ids: NDArray[np.int32]
    history: list[tuple[int, float]]
    drafted: list[Drafted]


def teach(
    parts: TargetParts,
    card: Callable[[int], HeadCard],
    files: Sequence[LessonFile],
    short_list: Callable[[], NDArray[np.int32]],
    job: Teaching,
    on_progress: OnProgress | None = None,
    cancel: CancelToken | None = None,
) -> Taught:
    """Train a head, or go on where an earlier run stopped, and return the best one found.

    Args:
        parts: The target.
        card: Returns the head's card for a number of tokens that it can draft.
        files: The lessons.
        short_list: Returns the tokens that a new head can draft; not called where a checkpoint names them.
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
        raise RequestError("there are too few answers to train on and to measure with; collect more (--tokens)")
    state = checkpoints.restore(job.folder, job.key) or Progressed(short_list(), Place(), 0, [])
    borrowed = Borrowed.of(parts, state.token_ids, job.device)
    trainer = _Trainer(card(len(state.token_ids)), borrowed, state, train, held, job)
    trainer.run(on_progress, cancel)
    best = trainer.best()
    drafted = drafted_on(trainer.card, best, borrowed, held)
    return Taught(folded(best), state.token_ids, state.history, drafted)


class _Trainer:
    """A training under way."""

    def __init__(
        self,
        card: HeadCard,
        borrowed: Borrowed,
        state: Progressed,
        train: Sequence[LessonFile],
        held: Sequence[Lesson],
        job: Teaching,
    ) -> None:
        self.card, self._borrowed, self._state, self._job = card, borrowed, state, job
        self._train, self._held = train, held
        self._n_in_all = int(sum(file.n_tokens for file in train) * job.n_passes)
        scale = tap_scale([lesson for lesson in train[0].read() if lesson.n_answer > 1])
        weights = new_weights(card, borrowed.parts.output_norm, scale, job.seed)
        self._learner = Learner(card, weights, borrowed)
        if state.learner is not None:
            self._learner.restore(state.learner)
        self._can_draft = np.zeros(card.n_vocab_target, np.bool_)
        self._can_draft[state.token_ids] = True

    def run(self, on_progress: OnProgress | None, cancel: CancelToken | None) -> None:
        """Learn until all passes are done, or the head no longer gets better."""
        state, saved_at = self._state, monotonic()
        groups = endless_groups(self._train, self._job.n_rows, self._job.seed, state.place)
        try:
            while not self._is_over():
                if cancel is not None:
                    cancel.check(_PHASE)
                place, lessons = next(groups)
                self._learner.learn(batch_of(lessons, DRAFT_STEPS, self._can_draft), state.n_seen / self._n_in_all)
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

    def best(self) -> Weights:
        """Return the tensors of the head when it was best."""
        found = self._state.best
        assert found is not None, "a training that is over has measured the head"
        return {name: values.to(self._job.device) for name, values in found.items()}

    def _is_over(self) -> bool:
        gains = [gain for _, gain in self._state.history]
        waited = len(gains) - 1 - gains.index(max(gains)) if gains else 0
        return bool(gains) and (self._state.n_seen >= self._n_in_all or waited >= _PATIENCE)

    def _is_measured_now(self) -> bool:
        seen, every = self._state.n_seen, max(1, self._n_in_all // _MEASUREMENTS)
        last = self._state.history[-1][0] if self._state.history else 0
        return seen // every > last // every or seen >= self._n_in_all

    def _measure(self) -> None:
        """Measure the head on the answers held back, and keep it where it is the best so far."""
        state = self._state
        weights = {name: values.detach().clone() for name, values in self._learner.weights.items()}
        drafted = drafted_on(self.card, weights, self._borrowed, self._held)
        gain = replay(drafted, lambda n: 1.0, MOST_DRAFTED).tokens_per_step
        if gain > state.best_yield:
            state.best = weights
        state.history.append((state.n_seen, gain))

    def _save(self) -> None:
        state = self._state
        state.learner = self._learner.state()
        checkpoints.save(self._job.folder, self._job.key, state)


def _held_back(files: Sequence[LessonFile]) -> list[Lesson]:
    """Return the greedy lessons held back, whose prompts no lesson to learn from has.

    A draft is right there where it is the target's most probable token.
    """
    learned = {found for file in files if not file.is_held_back for found in file.prompt_hashes()}
    found: list[Lesson] = []
    size = 0
    for file in files:
        if file.is_held_back and size < _MOST_HELD_BACK:
            greedy = [lesson for lesson in file.read() if lesson.temperature == 0 and lesson.n_answer > 1]
            lessons = [lesson for lesson in greedy if lesson.prompt_hash not in learned]
            size += sum(lesson.taps.size for lesson in lessons)
            found += lessons
    return found


def default_device() -> str:
    """Return "cuda" where torch finds such a device, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def set_threads(n_threads: int | None) -> Any:
    """Let torch use so many threads; None leaves it its own number."""
    if n_threads is not None:
        torch.set_num_threads(n_threads)
