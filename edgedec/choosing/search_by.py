"""Searches by name: what each finds, how many texts it holds at once, and whether it takes a scorer.

| name | n is the number of | the text that is chosen | source |
|---|---|---|---|
| "beam" | beams | the highest mean log-probability | beam search |
| "diverse" | groups of one beam | the highest score of your scorer, else the vote | arXiv:1610.02424 |
| "cntp" | most trials at a position | the one that is written | CNTP, arXiv:2507.03038 |
| "adadec" | tokens compared at a position | the one that is written | AdaDec, arXiv:2506.08980 |
| "particles" | particles | the highest last score of your scorer, else the vote | arXiv:2502.01618 |
| "a-star" | steps tried behind a prefix | the lowest cost | A*-decoding, arXiv:2505.13672 |
| "planned" | texts that are tried | the highest score | PG-TD, arXiv:2303.05510 |
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from edgedec.choosing.a_star import a_star, most_expansions
from edgedec.choosing.adadec import LookAhead, reranked
from edgedec.choosing.beam import beam_search
from edgedec.choosing.cntp import Caution, cautious
from edgedec.choosing.command_scorer import SCORER_S
from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.particles import Steps, filtered
from edgedec.choosing.planning import Planning, planned
from edgedec.choosing.scorer import Scorer, TextScorer, require_scorer
from edgedec.choosing.vote import ANSWER, answer_of, answer_pattern, voted
from edgedec.counted import counted
from edgedec.errors import OptionError, argument

PENALTY = 0.5
"""What a token of "diverse" loses for each earlier group that took it: lambda of the paper, from its range."""
MOST_STEP_TOKENS = 64


@dataclass(frozen=True, slots=True)
class Found:
    """What a search ends with.

    Attributes:
        texts: The texts that it ends with, at least one.
        place: The place of the chosen one.
        why: Why it was chosen, as part of a sentence.
        scores: By text, its score, 0 to 1; empty where nothing scored them.
    """

    texts: tuple[PartialText, ...]
    place: int
    why: str
    scores: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a search runs with.

    Attributes:
        n: Its size.
        steps: How tokens are drawn, and where steps end.
        scorer: Scores texts; None for a search that was given none and has no use for the model's judgement.
        is_checked: Whether the scorer is the caller's; the model's judgement is worth less than a vote.
        answer: The pattern of an answer, for a vote.
    """

    n: int
    steps: Steps
    scorer: TextScorer | None
    is_checked: bool
    answer: str


@dataclass(frozen=True, slots=True)
class Method:
    """A search.

    Attributes:
        n: Its size where none is given.
        most: Its greatest size.
        draws: Whether tokens are drawn by the sampling options; else they are the most probable ones.
        scored: Whether it takes a scorer: "no"; "may", and goes without; "judge", the model's judgement being the
            default; "must".
        n_texts: `(n)` -> how many texts it holds at most.
        run: `(texts, setting)` -> what it finds.
    """

    n: int
    most: int
    draws: bool
    scored: Literal["no", "may", "judge", "must"]
    n_texts: Callable[[int], int]
    run: Callable[[PartialTexts, Setting], Found]


def _beam(texts: PartialTexts, setting: Setting) -> Found:
    found = tuple(beam.text for beam in beam_search(texts, setting.n))
    return Found(found, 0, f"its mean log-probability of a token, {found[0].mean_logprob:.3f}, is the highest")


def _diverse(texts: PartialTexts, setting: Setting) -> Found:
    beams = beam_search(texts, setting.n, n_groups=setting.n, penalty=PENALTY if setting.n > 1 else 0.0)
    found = tuple(beam.text for beam in beams)
    scores = () if setting.scorer is None else setting.scorer(texts, found)
    return _elected(texts, found, scores, setting)


def _cntp(texts: PartialTexts, setting: Setting) -> Found:
    caution = Caution(most_trials=setting.n)
    return Found((cautious(texts, setting.steps.params, setting.steps.seed, caution),), 0, "it is the one text")


def _adadec(texts: PartialTexts, setting: Setting) -> Found:
    return Found((reranked(texts, LookAhead(n_candidates=setting.n)),), 0, "it is the one text")


def _particles(texts: PartialTexts, setting: Setting) -> Found:
    assert setting.scorer is not None, "particles are scored"
    found = filtered(texts, setting.n, setting.steps, setting.scorer)
    return _elected(texts, found.texts, found.scores, setting)


def _a_star(texts: PartialTexts, setting: Setting) -> Found:
    assert setting.scorer is not None, "steps are scored"
    most = min(64, most_expansions(setting.n))
    found, n_expanded = a_star(texts, setting.n, setting.steps, setting.scorer, most_expanded=most)
    return Found((found,), 0, f"its steps have the lowest cost after {n_expanded} of at most {most} expansions")


def _planned(texts: PartialTexts, setting: Setting) -> Found:
    assert setting.scorer is not None, "whole texts are scored"
    found = planned(texts, setting.scorer, Planning(n_rollouts=setting.n))
    why = f"its score, {found.reward:.3f}, is the highest of the {found.n_rollouts} that were tried"
    return Found((found.text,), 0, why, (found.reward,))


def _elected(texts: PartialTexts, found: Sequence[PartialText], scores: Sequence[float], setting: Setting) -> Found:
    """Return the text with the caller's highest score; without the caller's scores, the one that the vote chooses."""
    answers = [answer_of(texts.text(text), setting.answer) for text in found]
    n = len(found)
    if setting.is_checked or (scores and not any(answers)):
        place = max(range(n), key=scores.__getitem__)
        why = f"its score, {scores[place]:.3f}, is the highest of {n}"
    else:
        place = voted(answers)
        answer, n_voters = answers[place], sum(each is not None for each in answers)
        votes = f"its answer, {answer or '':.60}, has {answers.count(answer)} of {counted(n_voters, 'vote')}"
        why = "no text states an answer" if answer is None else votes
    return Found(tuple(found), place, why, tuple(scores))


METHODS: Mapping[str, Method] = {
    "beam": Method(4, 64, False, "no", lambda n: 2 * n, _beam),
    "diverse": Method(4, 64, False, "may", lambda n: 2 * n, _diverse),
    "cntp": Method(5, 64, True, "no", lambda n: n, _cntp),
    "adadec": Method(3, 16, False, "no", lambda n: n + 1, _adadec),
    "particles": Method(8, 64, True, "judge", lambda n: 2 * n, _particles),
    "a-star": Method(4, 16, True, "judge", lambda n: 64, _a_star),
    "planned": Method(8, 64, False, "must", lambda n: n + 4, _planned),
}


@dataclass(frozen=True, slots=True)
class SearchBy:
    """How a text is searched for.

    Attributes:
        name: The search, one of METHODS.
        n: Its size, which METHODS explains; None for its own default.
        scorer: What scores the texts: a function `(prefix, steps) -> scores`, or the argument list of a command. None
            for the model's own one-token judgement, where the search needs scores.
        scorer_seconds: Most seconds of a call of the scorer.
        answer: The regular expression of an answer, for the vote of "diverse".
        separator: What ends a step of "particles" and of "a-star"; a step has at most MOST_STEP_TOKENS tokens.

    Raises:
        OptionError: The name is unknown, the size is out of range, or the scorer is missing or not wanted.
    """

    name: str = "beam"
    n: int | None = None
    scorer: Scorer | Sequence[str] | None = None
    scorer_seconds: float = SCORER_S
    answer: str = ANSWER
    separator: str = "\n"

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or self.name not in METHODS:
            raise OptionError("search", self.name, f"it must be one of {', '.join(METHODS)}")
        method, n = self.method, self.size
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= method.most:
            raise OptionError("search", f"{self.name}:{n}", f"its number must be a whole one from 1 to {method.most}")
        answer_pattern(self.answer)
        require_scorer(self.scorer, self.scorer_seconds)
        if self.scorer is not None and method.scored == "no":
            raise OptionError("scorer", self.scorer, f"the search {self.name!r} takes none; leave it out")
        if self.scorer is None and method.scored == "must":
            raise OptionError("scorer", None, f"the search {self.name!r} needs one; give a checker of whole texts")
        if not isinstance(self.separator, str) or not self.separator:
            raise OptionError("separator", self.separator, "it must be a text that ends a step, such as a line end")

    @property
    def method(self) -> Method:
        """The search itself."""
        return METHODS[self.name]

    @property
    def size(self) -> int:
        """The size of the search, its own default where none was given."""
        return self.method.n if self.n is None else self.n

    @property
    def n_texts(self) -> int:
        """How many texts the search holds at most; A* holds more where its scores lead astray."""
        return self.method.n_texts(self.size)


def search_named(words: str) -> tuple[str, int | None]:
    """Return the name and the size of a search that is written as "beam:4"; None for no size.

    Raises:
        OptionError: What follows the colon is no whole number.

    >>> search_named("beam:4"), search_named("adadec")
    (('beam', 4), ('adadec', None))
    """
    name, colon, number = words.partition(":")
    if not colon:
        return name, None
    if not number.isascii() or not number.isdigit() or len(number) > 9:
        raise OptionError("search", words, f"write a name, or a name and a number, such as {argument('search')} beam:4")
    return name, int(number)
