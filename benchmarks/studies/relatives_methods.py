"""What learns in the comparison of EAGLE-3's relatives: each method behind one protocol, and what all are given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from relatives_heads import HeadLearner, HeadShape
from relatives_prompt import N_PROMPT_TOKENS, PromptLearner, TorchLlama

from edgedec_export.training.batches import batch_of, tap_scale
from edgedec_export.training.foresight import drafted_on
from edgedec_export.training.learning import DRAFT_STEPS, Borrowed, Learner
from edgedec_export.training.lessons.lesson_files import Lesson, LessonFile
from edgedec_export.training.network import new_weights
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts
from edgedec_runtimes.trained_heads.head import Head

METHODS = ("eagle3", "medusa", "hydra", "ppd")

_MOST_HELD_BACK = 48_000_000


class Method(Protocol):
    """A method that learns."""

    def learn(self, lessons: Sequence[Lesson], part: float) -> int:
        """Learn from lessons when `part` of the training is over; return the tokens that it learned from."""

    def drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what it drafts on lessons."""

    def state(self) -> dict[str, Any]:
        """Return all that changes."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""


@dataclass(frozen=True, slots=True)
class Given:
    """What all methods share.

    Attributes:
        parts: The target.
        head: An EAGLE-3 head of it.
        files: The lessons.
    """

    parts: TargetParts
    head: Head
    files: list[LessonFile]

    @property
    def to_learn(self) -> list[LessonFile]:
        """The files to learn from."""
        return [file for file in self.files if not file.is_held_back and file.n_tokens]

    def held_back(self) -> list[Lesson]:
        """Return the greedy lessons held back that `edgedec train-drafter` measures on.

        No lesson to learn from has their prompts, and there are at most about _MOST_HELD_BACK numbers of taps.
        """
        learned = {found for file in self.to_learn for found in file.prompt_hashes()}
        found: list[Lesson] = []
        for file in self.files:
            if file.is_held_back and sum(lesson.taps.size for lesson in found) < _MOST_HELD_BACK:
                greedy = [lesson for lesson in file.read() if lesson.temperature == 0 and lesson.n_answer > 1]
                found += [lesson for lesson in greedy if lesson.prompt_hash not in learned]
        return found

    def borrowed(self) -> Borrowed:
        """Return what heads borrow from the target, with the head's short list."""
        return Borrowed.of(self.parts, self.head.d2t, "cpu")


class Eagle3:
    """An EAGLE-3 head that learns as in `edgedec train-drafter`."""

    def __init__(self, given: Given) -> None:
        self._borrowed, card = given.borrowed(), given.head.card
        scale = tap_scale([lesson for lesson in given.to_learn[0].read() if lesson.n_answer > 1])
        self._learner = Learner(card, new_weights(card, given.parts.output_norm, scale, 0), self._borrowed)
        self._can_draft = _can_draft(given)

    def learn(self, lessons: Sequence[Lesson], part: float) -> int:
        self._learner.learn(batch_of(lessons, DRAFT_STEPS, self._can_draft), part)
        return sum(lesson.n_answer for lesson in lessons)

    def drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        weights = {name: values.detach() for name, values in self._learner.weights.items()}
        return drafted_on(self._learner.card, weights, self._borrowed, lessons)

    def state(self) -> dict[str, Any]:
        return self._learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._learner.restore(state)


class Heads:
    """Medusa's or Hydra's heads."""

    def __init__(self, given: Given, *, reads_drafts: bool) -> None:
        shape = HeadShape(given.parts.network.n_embd, reads_drafts)
        self._learner = HeadLearner(shape, given.borrowed(), given.parts.network.rms_epsilon)
        self._can_draft = _can_draft(given)

    def learn(self, lessons: Sequence[Lesson], part: float) -> int:
        self._learner.learn(batch_of(lessons, self._learner.shape.n_heads, self._can_draft), part)
        return sum(lesson.n_answer for lesson in lessons)

    def drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        return self._learner.drafted(lessons)

    def state(self) -> dict[str, Any]:
        return self._learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._learner.restore(state)


class Prompts:
    """Prompt tokens, which begin as the tokens that the target writes most often."""

    def __init__(self, given: Given) -> None:
        counts = np.bincount(np.concatenate(given.to_learn[0].answers()))
        self._learner = PromptLearner(TorchLlama.of(given.parts), np.argsort(-counts)[:N_PROMPT_TOKENS])

    def learn(self, lessons: Sequence[Lesson], part: float) -> int:
        learned = 0
        for lesson in lessons:
            places = self._learner.places(lesson)
            self._learner.learn(lesson, places, part)
            learned += len(places)
        return learned

    def drafted(self, lessons: Sequence[Lesson]) -> list[Drafted]:
        return self._learner.drafted(lessons)

    def state(self) -> dict[str, Any]:
        return self._learner.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._learner.restore(state)


def method_of(name: str, given: Given) -> Method:
    """Return a method that has learned nothing."""
    if name == "eagle3":
        return Eagle3(given)
    return Prompts(given) if name == "ppd" else Heads(given, reads_drafts=name == "hydra")


def _can_draft(given: Given) -> NDArray[np.bool_]:
    found = np.zeros(given.parts.network.n_vocab, np.bool_)
    found[given.head.d2t] = True
    return found
