"""Choosing one of several finished texts: the contract of a chooser, and the choice by a chooser's name.

A chooser is a plug-in; edgedec.choosing.choosers has edgedec's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from edgedec.callers import one_line
from edgedec.choosing.partial_texts import AskedPrompt
from edgedec.choosing.vote import ANSWER, answer_of
from edgedec.errors import OptionError
from edgedec.plugins import CHOOSERS, is_installed, load_of_type, plugins
from edgedec.sequence import Generation

Kind = TypeVar("Kind")
ScoreTexts = Callable[[Sequence[Generation]], list[float]]
"""`(texts)` -> a score from 0 to 1 for each."""


@dataclass(frozen=True, slots=True)
class Candidates:
    """The texts that a chooser chooses among.

    Attributes:
        texts: All texts, by their seeds; those that were stopped early have the finish_reason "cancelled".
        whole: The places of the texts that may be chosen: those that were not stopped early; all where all were.
        answers: By text, the answer that it states; None where it states none.
        scores: By text, its score from 0 to 1; empty where the chooser asks for no scores.
    """

    texts: Sequence[Generation]
    whole: Sequence[int]
    answers: Sequence[str | None]
    scores: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class Chooser:
    """A way to choose one of several texts: what an entry point `chooser.NAME` of `edgedec.searches` names.

    Attributes:
        choose: `(candidates)` -> the place of the chosen text, one of `candidates.whole`, and why it was chosen, as
            part of a sentence.
        takes_scorer: Whether the caller gives a scorer; its scores are those of the candidates.
        open_scorer: `(prompt)` -> what scores the texts, for a chooser that has scores of its own. It is called before
            any text is written, and raises where the texts could not be scored.
        needs_logprobs: Whether the texts must have their log-probabilities.
        votes: Whether texts with equal answers support each other, so that n="auto" can count them.
        may_stop: `(ended, n_more, answer)` -> whether the texts that have ended settle the choice, so that the other
            `n_more` can stop; `answer` is the pattern of an answer.
    """

    choose: Callable[[Candidates], tuple[int, str]]
    takes_scorer: bool = False
    open_scorer: Callable[[AskedPrompt], ScoreTexts] | None = None
    needs_logprobs: bool = False
    votes: bool = False
    may_stop: Callable[[Sequence[Generation], int, str], bool] = lambda ended, n_more, answer: False


@dataclass(frozen=True, slots=True)
class ChosenText:
    """A text that was chosen among several.

    Attributes:
        place: Its place in `texts`.
        texts: All texts, by their seeds; those that were stopped early have the finish_reason "cancelled".
        answers: By text, the answer that it states; None where it states none.
        scores: By text, the judged chance or the caller's score, 0 to 1; empty where the method has none.
        why: Why it was chosen, as part of a sentence.
    """

    place: int
    texts: tuple[Generation, ...]
    answers: tuple[str | None, ...]
    scores: tuple[float, ...] = ()
    why: str = ""

    __repr__ = one_line

    @property
    def text(self) -> str:
        """What the chosen text says."""
        return self.texts[self.place].text

    @property
    def generation(self) -> Generation:
        """The chosen text."""
        return self.texts[self.place]


def installed(kind: str, option: str, name: object, expected: type[Kind]) -> Kind:
    """Return the plug-in that an option's value, `name`, names; `expected` is what it must be.

    Raises:
        OptionError: No plug-in has that name; the error lists those that are installed.
        PluginError: The plug-in does not import, or is something else.
    """
    if not isinstance(name, str) or not is_installed(kind, name):
        raise OptionError(option, name, f"it must be one of {', '.join(plugins(kind))}")
    return load_of_type(kind, name, expected)


def chooser_named(name: object) -> Chooser:
    """Return the chooser of that name (raises what installed() raises)."""
    return installed(CHOOSERS, "choose", name, Chooser)


def chosen_among(
    texts: Sequence[Generation], choose: str, *, answer: str = ANSWER, scores: Sequence[float] = ()
) -> ChosenText:
    """Return the choice among texts.

    Texts that were stopped early are not chosen, unless all were.

    Args:
        texts: At least one; with log-probabilities where the chooser needs them.
        choose: The chooser's name.
        answer: The pattern of an answer, a regular expression; its first group, or the whole match, counts.
        scores: By text, a number from 0 to 1, where the chooser needs scores.

    Raises:
        OptionError: The chooser is unknown, the pattern is invalid, or scores are missing.
    """
    chooser = chooser_named(choose)
    if (chooser.takes_scorer or chooser.open_scorer is not None) and len(scores) != len(texts):
        raise OptionError("scores", list(scores), f"{choose} needs one for each of the {len(texts)} texts")
    answers = tuple(answer_of(text.text, answer) for text in texts)
    whole = [i for i, text in enumerate(texts) if text.finish_reason != "cancelled"] or list(range(len(texts)))
    place, why = chooser.choose(Candidates(texts, whole, answers, scores))
    return ChosenText(place, tuple(texts), answers, tuple(scores), why)
