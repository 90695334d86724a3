"""DeepSeek-GRM: a model writes principles and critiques of a text by them, whose grades are its score.

Each critique is drawn with a seed of its own, first states the principles, and ends with a grade from 0 to 10; one
without a grade counts for nothing. A meta judge says which critiques are right, and the better half of them counts. The
critic is the model that writes, or any other one; the paper trains critic and meta judge.

Paper: DeepSeek-GRM, Liu et al. 2025, arXiv:2504.02495, without its training
Option: Python only, `critic`, as the scorer of `BestOf`, and `critic_check` as the check of `RefineBy`
For: texts without a checker, where a larger model is at hand as the critic
Measured: 1.5B: 9 of 12 word problems, 96 s; greedily 9, 5 s (`python benchmarks/answers/judged_answers.py MODEL`)
Status: study
"""

import re
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Protocol, Unpack

from edgedec.api.branching import branches
from edgedec.api.engine import Engine
from edgedec.api.requests import RequestOptions
from edgedec.chat import Message
from edgedec.choosing.scorer import Scorer
from edgedec.errors import OptionError
from edgedec.sequence import Generation
from edgedec_methods.judgement import chance_yes, question_of

ASKED = """Question:
{prefix}

Answer:
{text}

First write two or three principles, one a line, by which an answer to this question must be judged, each with its \
weight in percent. Then say by each of them in a short sentence what is right or wrong in the answer. End with \
"Grade: " and a whole number from 0 (wrong) to 10 (right in everything)."""
META = """{asked}

A critique of the answer:
{critique}

Are its principles fit for the question, and is what it says of the answer true? Reply with one letter: A for yes, B \
for no."""
_GRADE = re.compile(r"Grade:\W*(\d{1,2})\b")
BEST_GRADE = 10
Meta = Callable[[str, str, str], float]
"""`(prefix, text, critique)` -> how likely it is that the critique is right."""


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


def meta_judge(engine: Engine) -> Meta:
    """Return a meta judge: the chance that a model, by one letter, gives a critique to be right."""
    letters = question_of(engine.tokenizer)

    def judge(prefix: str, text: str, critique: str) -> float:
        asked = META.format(asked=ASKED.format(prefix=prefix, text=text), critique=critique)
        with branches(engine, engine.chat_ids(asked), most=1) as opened:
            return chance_yes(opened.logits, letters)

    return judge


def critic(engine: Writer, n: int = 4, meta: Meta | None = None, **options: Unpack[RequestOptions]) -> Scorer:
    """Return a scorer: a text's score is the mean grade of n critiques, 0 where none states a grade.

    Args:
        engine: Writes the critiques; while it searches for a text itself, it can't.
        n: How many critiques of each text.
        meta: Says which half of the critiques counts; None where all do.
        **options: Those of Engine.samples, such as the seed and max_tokens.

    Raises:
        OptionError: There are no critiques.
    """
    score = _scored(engine, n, meta, options)
    return lambda prefix, steps: [score(prefix, step)[0] for step in steps]


def critic_check(
    engine: Writer, n: int = 4, meta: Meta | None = None, **options: Unpack[RequestOptions]
) -> Callable[[str, str], tuple[float, str]]:
    """Return `(prefix, text)` -> the mean grade of n critiques, and the words of the worst one; as critic()."""
    return _scored(engine, n, meta, options)


def _scored(
    engine: Writer, n: int, meta: Meta | None, options: RequestOptions
) -> Callable[[str, str], tuple[float, str]]:
    if n < 1:
        raise OptionError("n", n, "it must be at least 1")

    def score(prefix: str, text: str) -> tuple[float, str]:
        graded = [
            (grade, words) for grade, words in critiques_of(engine, prefix, text, n, options) if grade is not None
        ]
        if meta is not None:
            graded.sort(key=lambda each: -meta(prefix, text, each[1]))
            del graded[(len(graded) + 1) // 2 :]
        return (fmean(grade for grade, _ in graded), min(graded)[1]) if graded else (0.0, "")

    return score
