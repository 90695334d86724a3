"""Graded critiques (after DeepSeek-GRM): a model writes several critiques of a text, and their grades are its score.

Each critique is drawn with a seed of its own, and ends with a grade from 0 to 10; a critique without a grade counts for
nothing. The critiques of a text are written together. The critic is the model that writes, or any other one.

Paper: after DeepSeek-GRM, Liu et al. 2025, arXiv:2504.02495, without its principles and its meta model
Option: Python only, `critic`, as the scorer of `BestOf`, and `critic_check` as the check of `RefineBy`
For: texts without a checker, where a larger model is at hand as the critic
Measured: nothing yet
Status: study
"""

import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol, Unpack

from edgedec.api.requests import RequestOptions
from edgedec.chat import Message
from edgedec.choosing.scorer import Scorer
from edgedec.errors import OptionError
from edgedec.sequence import Generation

ASKED = """Question:
{prefix}

Answer:
{text}

Is the answer right, and does it do all that the question asks? Say in two or three short sentences what is wrong with \
it, if anything is. End with "Grade: " and a whole number from 0 (wrong) to 10 (right in everything)."""
_GRADE = re.compile(r"Grade:\W*(\d{1,2})\b")
BEST_GRADE = 10


class Writer(Protocol):
    """What critiques need of an engine."""

    def samples(
        self, prompt: Sequence[Message], n: int = 8, **options: Unpack[RequestOptions]
    ) -> tuple[Generation, ...]:
        """Generate n texts of a chat together; text k draws with the seed plus k."""


def grade_of(critique: str) -> float | None:
    """Return the last grade that a critique states, as a score from 0 to 1; None where it states none.

    >>> grade_of("Grade: 3. No: **Grade:** 7"), grade_of("fine"), grade_of("Grade: 11")
    (0.7, None, None)
    """
    grades = _GRADE.findall(critique)
    return int(grades[-1]) / BEST_GRADE if grades and int(grades[-1]) <= BEST_GRADE else None


def critiques_of(
    engine: Writer, prefix: str, text: str, n: int, options: RequestOptions
) -> list[tuple[float | None, str]]:
    """Return n critiques of a text, each with its score from 0 to 1, or None where it states none."""
    asked: list[Message] = [{"role": "user", "content": ASKED.format(prefix=prefix, text=text)}]
    return [(grade_of(each.text), each.text) for each in engine.samples(asked, n, **options)]


def critic(engine: Writer, n: int = 4, **options: Unpack[RequestOptions]) -> Scorer:
    """Return a scorer: a text's score is the mean grade of n critiques, 0 where none states a grade.

    Args:
        engine: Writes the critiques; while it searches for a text itself, it can't.
        n: How many critiques of each text.
        **options: Those of Engine.samples, such as the seed and max_tokens.

    Raises:
        OptionError: There are no critiques.
    """
    score = _scored(engine, n, options)
    return lambda prefix, steps: [score(prefix, step)[0] for step in steps]


def critic_check(
    engine: Writer, n: int = 4, **options: Unpack[RequestOptions]
) -> Callable[[str, str], tuple[float, str]]:
    """Return `(prefix, text)` -> the mean grade of n critiques, and the words of the worst one; as critic()."""
    return _scored(engine, n, options)


def _scored(engine: Writer, n: int, options: RequestOptions) -> Callable[[str, str], tuple[float, str]]:
    if n < 1:
        raise OptionError("n", n, "it must be at least 1")

    def score(prefix: str, text: str) -> tuple[float, str]:
        graded = [
            (grade, words) for grade, words in critiques_of(engine, prefix, text, n, options) if grade is not None
        ]
        return (fmean(grade for grade, _ in graded), min(graded)[1]) if graded else (0.0, "")

    return score
