"""The methods of the comparison of EAGLE-3's relatives: what each is made of, and what its drafts cost.

"block" is the drafter of `edgedec train-drafter --kind block`; "deer" is the same with a Markov head that stays zero,
so that the laws of a block's tokens are independent of each other, as a diffusion model's are after one step (DEER).
"narrow" is the draft model that "narrow-tvd" and "s2d" change.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from relatives_chains import Chimera, Clover, Fspad, draft_bytes
from relatives_costs import ByRows, DraftBytes, Price, by_bytes
from relatives_heads import Heads
from relatives_learning import Learner, Network
from relatives_narrow import Narrow, narrow_price, variation

from edgedec_export.training.batches import tap_scale
from edgedec_export.training.block.network import MARKOV_TABLE, shape_of
from edgedec_export.training.block.shape import block_card, block_shape, price_of
from edgedec_export.training.block.student import BlockStudent
from edgedec_export.training.head_student import HeadStudent
from edgedec_export.training.kinds import N_ROWS, bytes_per_step, row_bytes
from edgedec_export.training.learning import Borrowed
from edgedec_export.training.lessons.lesson_files import Lesson, LessonFile
from edgedec_export.training.network import Weights, cross_entropy, new_weights
from edgedec_export.training.rows.student import RowStudent
from edgedec_export.training.short_list import count_tokens, short_list
from edgedec_export.training.simulation import Drafted
from edgedec_export.training.target_parts import TargetParts, card_of
from edgedec_runtimes.trained_heads.card import HeadCard, RowShape

_MOST_HELD_BACK = 48_000_000
_MARKOV = (MARKOV_TABLE, "markov_w2")
_FITTED_FILES = 4  # of lessons, to which a draft model's output is fitted


class Method(Protocol):
    """A drafter that learns: what edgedec_export.training.learning.Student asks for, and the way back."""

    @property
    def weights(self) -> Weights:
        """The tensors, which learn() changes."""

    def learn(self, lessons: Sequence[Lesson], part: float) -> float:
        """Learn from lessons and return the loss, in nats; `part` of the training is over, 0 to 1."""

    def drafted(self, weights: Weights, lessons: Sequence[Lesson]) -> list[Drafted]:
        """Return what it drafts on lessons with these tensors, its own."""

    def state(self) -> dict[str, Any]:
        """Return all that changes."""

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from what state() returned."""


@dataclass(frozen=True)
class Given:
    """What all methods share.

    Attributes:
        parts: The target.
        files: The lessons.
        n_vocabulary: How many tokens can be drafted.
    """

    parts: TargetParts
    files: Sequence[LessonFile]
    n_vocabulary: int

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

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64[n_vocab], how often the target writes each token in the lessons to learn from."""
        return sum(
            (count_tokens(file.answers(), self.parts.network.n_vocab) for file in self.to_learn),
            np.zeros(self.parts.network.n_vocab, np.int64),
        )

    @cached_property
    def borrowed(self) -> Borrowed:
        """What drafters borrow from the target, with the short list that `edgedec train-drafter` would choose."""
        return Borrowed.of(self.parts, short_list(self.counts, self.n_vocabulary), "cpu")

    @property
    def card(self) -> HeadCard:
        """The shape of an EAGLE-3 head."""
        return card_of(self.parts, "", len(self.borrowed.token_ids), None)

    def first_lessons(self, n_files: int = 1) -> list[Lesson]:
        """Return the lessons of the first files to learn from that have more than one token."""
        return [lesson for file in self.to_learn[:n_files] for lesson in file.read() if lesson.n_answer > 1]

    @cached_property
    def tap_scale(self) -> NDArray[np.float32]:
        """float32[n_taps * n_embd], the usual sizes of the elements of the taps."""
        return tap_scale(self.first_lessons())


@dataclass(frozen=True, slots=True)
class Relative:
    """A method.

    Attributes:
        paper: Where it is from.
        new: Returns one that has learned nothing.
        price: Returns what its drafts cost.
    """

    paper: str
    new: Callable[[Given], Method]
    price: Callable[[Given], Price]


def _eagle3(given: Given) -> Method:
    ids = given.borrowed.token_ids
    return HeadStudent(given.parts, given.card, ids, given.first_lessons(), seed=0, device="cpu")


def eagle3_price(given: Given, card: HeadCard) -> Price:
    """Return what the drafts of an EAGLE-3 head with a card cost: fc once a round, the rest for each token."""
    rows = card.n_vocab_draft * row_bytes(given.parts)
    weights = new_weights(card, given.parts.output_norm, given.tap_scale, 0)
    return by_bytes(draft_bytes(weights, rows, {"fc"}), given.parts)


def _of_network(paper: str, network: Callable[[Given], Network]) -> Relative:
    def price(given: Given) -> Price:
        rows = len(given.borrowed.token_ids) * row_bytes(given.parts)
        return by_bytes(network(given).draft_bytes(rows), given.parts)

    return Relative(paper, lambda given: Learner(network(given), given.borrowed), price)


def _heads(paper: str, *, reads_drafts: bool) -> Relative:
    return _of_network(paper, lambda given: Heads(given.parts, reads_drafts=reads_drafts))


def _chain(paper: str, kind: Callable[[HeadCard, Borrowed, Any], Network]) -> Relative:
    return _of_network(paper, lambda given: kind(given.card, given.borrowed, given.tap_scale))


def _rows(given: Given, layer: int) -> Method:
    ids = given.borrowed.token_ids
    return RowStudent(given.parts, RowShape(N_ROWS, layer), ids, given.first_lessons(), device="cpu")


def _transfer_price(given: Given) -> ByRows:
    tensors, n_below = given.parts.gguf.tensors, given.parts.taps[1]
    below = sum(info.n_bytes for name, info in tensors.items() if f"{name}.".split(".")[1] in map(str, range(n_below)))
    return ByRows(below / bytes_per_step(given.parts))


def _narrow(paper: str, exits: Sequence[int], loss: Any = cross_entropy) -> Relative:
    def new(given: Given) -> Method:
        return Narrow(given.borrowed, lambda: given.first_lessons(_FITTED_FILES), exits, loss)

    return Relative(paper, new, lambda given: narrow_price(given.borrowed, exits))


def _block(paper: str, *, markov: bool) -> Relative:
    def card(given: Given) -> HeadCard:
        shape = block_shape(given.parts.network.n_embd, None, None, None if markov else 1)
        return block_card(given.parts, shape, len(given.borrowed.token_ids), None)

    def new(given: Given) -> Method:
        ids = given.borrowed.token_ids
        student = BlockStudent(given.parts, card(given), ids, given.first_lessons(), seed=0, device="cpu")
        if not markov:
            for name in _MARKOV:
                student.weights[name].requires_grad_(False).zero_()
        return student

    def price(given: Given) -> Price:
        read, shape = price_of(card(given), 1, row_bytes(given.parts)), shape_of(card(given))
        return by_bytes(DraftBytes(read.once, (read.level if markov else 0.0,) * shape.size), given.parts)

    return Relative(paper, new, price)


METHODS: Mapping[str, Relative] = {
    "eagle3": Relative("2503.01840", _eagle3, lambda given: eagle3_price(given, given.card)),
    "medusa": _heads("2401.10774", reads_drafts=False),
    "hydra": _heads("2402.05109", reads_drafts=True),
    "clover": _chain("2408.00264", Clover),
    "chimera": _chain("2402.15758", Chimera),
    "fspad": _chain("2408.15562", Fspad),
    "block": _block("2602.06036", markov=True),
    "deer": _block("2512.15176", markov=False),
    "narrow": _narrow("", (4,)),
    "narrow-tvd": _narrow("2403.00858", (4,), variation),
    "s2d": _narrow("2407.01955", (1, 2, 4)),
    "transfer": Relative("2404.12022", lambda given: _rows(given, given.parts.taps[1]), _transfer_price),
    "ppd": Relative("2405.18628", lambda given: _rows(given, 0), lambda given: ByRows()),
}
