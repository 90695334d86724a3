"""A text that first thinks and then keeps to its grammar: what is thought is free, and may have a budget of tokens.

What a model thinks stands between two marks, such as <think> and </think>. A grammar binds what follows the second one.
A text without thoughts keeps to its grammar from its first token. After a budget of tokens the second mark is written
in place of what the model would think on. All this depends on the tokens of the text alone, so drafts change nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from edgedec.constraint import Constraint, DrawPlace
from edgedec.logit_ops import NUMPY_ROW_OPS, LogitOps
from edgedec.mark_vocabulary import MarkVocabulary, Mask, without
from edgedec.thought_marks import Thoughts
from edgedec.tokenizer import Tokenizer

_MOST_GAP = 2  # tokens of white space between thoughts and answer


class _Phase(Enum):
    START = "the first token decides whether the text begins with thoughts"
    MARK = "one of some marks is to come, or the rest of it"
    THINKING = "the thoughts go on"
    GAP = "the closing mark came, and white space may follow"
    ANSWER = "the rest keeps to the grammar"


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a text stands.

    Attributes:
        phase: The part of the text that its next token belongs to.
        n: Tokens of that part so far; of the answer 1 where the token that led there is not its first, and -k where k
            tokens before that one, which began like the mark, are the answer's, too.
        tail: The end of the thoughts, as long as it may be the beginning of the closing mark.
        marks: The marks that may come, all of which begin with the `n` tokens that came.
    """

    phase: _Phase
    n: int = 0
    tail: bytes = b""
    marks: tuple[tuple[int, ...], ...] = ()


class ThinkingVocabulary(MarkVocabulary):
    """What tokens say, as far as thoughts and their marks are concerned; made once for a model and its marks."""

    def __init__(self, tokenizer: Tokenizer, thoughts: Thoughts) -> None:
        super().__init__(tokenizer, [thoughts.closes], thoughts.opens + thoughts.written + thoughts.alone)
        self.opening, self.closing = self.ids_of(thoughts.opens), self.ids_of(thoughts.written)
        self.then, self.alone = self.ids_of(thoughts.then), self.ids_of(thoughts.alone)


class Anything:
    """Implements edgedec.grammar.GrammarState for texts that keep to nothing."""

    is_complete, may_end, predicate = False, True, None

    def __init__(self, n_vocab: int) -> None:
        self._all = np.ones(n_vocab, np.bool_)

    def allowed(self) -> Mask:
        """Return that every token may follow."""
        return self._all.copy()

    def forced(self) -> Sequence[int]:
        """Return no token."""
        return ()

    def advance(self, token_id: int) -> bool:
        """Take a token."""
        return True

    def back(self, n_tokens: int) -> None:
        """Take back tokens, of which nothing is known."""

    def close(self) -> None:
        """Free nothing."""


class ThinkingConstraint(Constraint):
    """The constraint of a text that may think before its answer.

    Args:
        answer: The constraint of the answer alone, whose first token stands behind the thoughts.
        thoughts: The marks, and the budget.
        vocabulary: What the tokens say.
    """

    def __init__(self, answer: Constraint, thoughts: Thoughts, vocabulary: ThinkingVocabulary) -> None:
        self._answer, self._vocabulary, self._budget = answer, vocabulary, thoughts.budget
        self._place = _Place(_Phase.THINKING if thoughts.opened else _Phase.START)
        self._n_left: int | None = None
        self._n_before = 0  # tokens before the answer
        self._was_cut = False

    @property
    def note(self) -> str:  # type: ignore[override]
        """A note for a person on how the text came about; may be empty."""
        cut = f"the thoughts ended after {self._budget} tokens (think)" if self._was_cut else ""
        return "; ".join(filter(None, (cut, self._answer.note)))

    @property
    def note_if_cut(self) -> str:  # type: ignore[override]
        """A note for a person, should the text be cut before its end."""
        if self._answers or self._place.phase is _Phase.START:
            return self._answer.note_if_cut
        return "the text was cut in its thoughts: allow more tokens, or fewer of thoughts (think)"

    @property
    def _answers(self) -> bool:
        return self._place.phase is _Phase.ANSWER

    def begin(self, n_tokens: int) -> None:
        """Set how many tokens the text may have; the thoughts leave the answer as many as it needs at least."""
        self._n_left, n_marks = n_tokens, len(self._vocabulary.closing)
        is_opened = self._place.phase is _Phase.THINKING
        self._answer.begin(max(1, n_tokens - n_marks) if is_opened else n_tokens)
        if self._answer.n_least:
            n_marks += _MOST_GAP if is_opened else _MOST_GAP + len(self._vocabulary.opening)
            most = n_tokens - self._answer.n_least - n_marks
            self._budget = max(0, most if self._budget is None else min(most, self._budget))

    @property
    def is_over(self) -> bool:
        """Whether no token may follow, or none has room."""
        return self._n_left == 0 or self.is_complete

    @property
    def is_complete(self) -> bool:
        """Whether the text is whole and no token may follow."""
        return self._answers and self._answer.is_complete

    @property
    def may_end(self) -> bool:
        """Whether the text is whole; tokens may still follow."""
        is_outside = self._place.phase in (_Phase.START, _Phase.GAP, _Phase.ANSWER) or self._may_answer(self._place)
        return is_outside and self._answer.may_end

    def choose(self, place: DrawPlace, path: Sequence[int]) -> int:
        """Return the token that is drawn after the text and `path` (raises RequestError as masked())."""
        answered = self._answered(path)
        return super().choose(place, path) if answered is None else self._answer.choose(place, answered)

    def log_mass(
        self, logits: NDArray[np.float32], path: Sequence[int], temperature: float, ops: LogitOps = NUMPY_ROW_OPS
    ) -> float:
        """Return log Z after the text and `path`; see Constraint.log_mass."""
        answered = self._answered(path)
        if answered is None:
            return super().log_mass(logits, path, temperature, ops)
        return self._answer.log_mass(logits, answered, temperature, ops)

    def allowed(self, path: Sequence[int] = ()) -> Mask:
        """Return bool[n]: which tokens may follow the text and `path`; those from n on may not. Do not change it."""
        walked = self._walked(path)
        if walked is None:
            return np.zeros(0, np.bool_)
        (place, n), vocabulary = walked, self._vocabulary
        if place.phase is _Phase.ANSWER:
            return self._answer.allowed(self._from(path, n))
        marks, n_marked = self._marks(place)
        if place.phase is _Phase.THINKING and not marks:
            return without(vocabulary.thinking, vocabulary.ruled_out(place.tail))
        allowed = np.zeros(len(vocabulary.thinking), np.bool_)
        begun = vocabulary.opening[:n_marked] if self._may_answer(place) else ()
        if begun or place.phase is _Phase.GAP or (place.phase is _Phase.START and not vocabulary.alone):
            answer = self._answer.allowed(begun)
            allowed[: len(answer)] = answer[: len(allowed)]
        if place.phase is _Phase.GAP and place.n < _MOST_GAP:
            allowed |= vocabulary.blank
        allowed[[mark[n_marked] for mark in marks]] = True
        if place.phase is _Phase.START and self._budget == 0:
            allowed[list(vocabulary.opening if len(vocabulary.opening) == 1 else ())] = False
        return allowed

    def allows(self, path: Sequence[int], token_id: int) -> bool:
        """Return whether a token may follow the text and `path`; see Constraint.allows."""
        whole = (*path, token_id)
        walked = self._walked(whole)
        if walked is None:
            return False
        answered = self._from(whole, walked[1]) if walked[0].phase is _Phase.ANSWER else ()
        return not answered or self._answer.allows(answered[:-1], answered[-1])

    def forced(self) -> tuple[int, ...]:
        """Return tokens that are certain to follow the text, perhaps not all of them."""
        if self._answers:
            return self._answer.forced()
        marks, n = self._marks(self._place)
        is_certain = len(marks) == 1 and self._place.phase is not _Phase.START and not self._may_answer(self._place)
        return marks[0][n:] if is_certain else ()

    def commit(self, token_id: int) -> int:
        """Add the chosen token to the text, or another one in its place, and return the token that was added."""
        self._n_left = None if self._n_left is None else self._n_left - 1
        if self._answers:
            return self._answer.commit(token_id)
        self._was_cut |= self._is_spent(self._place)
        self._place = self._step(self._place, token_id) or self._place
        self._n_before += not self._answers or self._place.n
        if not self._answers:
            return token_id
        n = self._place.n
        if self._n_left is not None:
            self._answer.begin(self._n_left + 1 - n)
        for begun in self._vocabulary.opening[: max(0, -n)]:
            self._answer.commit(begun)
        return self._answer.commit(token_id) if n < 1 else token_id

    def end_at(self, n_tokens: int) -> None:
        """Take note that the text ends behind its first `n_tokens` tokens; further ones that were added are no text."""
        self._answer.end_at(max(0, n_tokens - self._n_before))

    def close(self) -> None:
        """Free the memory of the grammar's state; the constraint must not be used afterwards."""
        self._answer.close()

    def _answered(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return what of a path belongs to the answer; None where the path ends before the answer."""
        walked = self._walked(path)
        return self._from(path, walked[1]) if walked is not None and walked[0].phase is _Phase.ANSWER else None

    def _from(self, path: Sequence[int], start: int) -> Sequence[int]:
        """Return a path from a place on; before its beginning are the tokens with which the text began like a mark."""
        return path[start:] if start >= 0 else (*self._vocabulary.opening[:-start], *path)

    def _may_answer(self, place: _Place) -> bool:
        """Return whether a text that began like the mark of thoughts may yet turn out to be an answer."""
        vocabulary, n = self._vocabulary, place.n
        is_begun = place.phase is _Phase.MARK and place.marks == (vocabulary.opening,) and not vocabulary.alone
        return is_begun and self._answer.allows(vocabulary.opening[: n - 1], vocabulary.opening[n - 1])

    def _walked(self, path: Sequence[int]) -> tuple[_Place, int] | None:
        """Return the place behind the text and `path`, and how many tokens of the path stand before the answer."""
        place = self._place
        if place.phase is _Phase.ANSWER:
            return place, 0
        for i, token_id in enumerate(path):
            stepped = self._step(place, token_id)
            if stepped is None:
                return None
            if stepped.phase is _Phase.ANSWER:
                return stepped, i + stepped.n
            place = stepped
        return place, len(path)

    def _is_spent(self, place: _Place) -> bool:
        """Return whether the budget is used up where the thoughts would go on."""
        return place.phase is _Phase.THINKING and self._budget is not None and place.n >= self._budget

    def _marks(self, place: _Place) -> tuple[tuple[tuple[int, ...], ...], int]:
        """Return the marks one of which may come now, and how many of their tokens came."""
        vocabulary = self._vocabulary
        if place.phase is _Phase.START:
            opening = () if self._budget == 0 else (vocabulary.opening,)
            return (*opening, *((vocabulary.alone,) if vocabulary.alone else ())), 0
        return ((vocabulary.closing,), 0) if self._is_spent(place) else (place.marks, place.n)

    def _step(self, place: _Place, token_id: int) -> _Place | None:
        """Return where a text stands behind one more token; None where that may not follow."""
        vocabulary, phase = self._vocabulary, place.phase
        marks, n = self._marks(place)
        going_on = tuple(mark for mark in marks if mark[n] == token_id)
        if phase is _Phase.START and not vocabulary.alone:
            if self._budget == 0 and vocabulary.opening == (token_id,):
                return None
            if not going_on:
                return _Place(_Phase.ANSWER)
        if marks:
            whole = [mark for mark in going_on if len(mark) == n + 1]
            if not going_on and self._may_answer(place):
                return _Place(_Phase.ANSWER, -n)
            if not whole:
                return _Place(_Phase.MARK, n + 1, marks=going_on) if going_on else None
            return _Place(_Phase.THINKING) if whole[0] == vocabulary.opening else _Place(_Phase.ANSWER, 1)
        text = vocabulary.text(token_id)
        if phase is _Phase.GAP:
            return _Place(phase, place.n + 1) if text.isspace() and place.n < _MOST_GAP else _Place(_Phase.ANSWER)
        if not vocabulary.thinking[token_id]:
            return None
        mark, rest = vocabulary.partition(place.tail + text)
        if mark is None:
            return _Place(phase, place.n + 1, vocabulary.tail(place.tail + text))
        if rest.strip():
            return None
        return _Place(_Phase.MARK, marks=(vocabulary.then,)) if vocabulary.then else _Place(_Phase.GAP)
