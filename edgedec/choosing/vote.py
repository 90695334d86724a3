r"""Majority vote on the answers that texts state (self-consistency; Wang et al. 2022, arXiv:2203.11171)."""

import re
from collections.abc import Sequence

from edgedec.errors import OptionError, counted

ANSWER = r"(?:[Aa]nswer|ANSWER)\W*?[:=]\W*(\S.*\S|\S)"
"""The default answer pattern: what follows the last "Answer:" on its line."""
_MOST_CHARS = 200_000  # of a text that a pattern searches


def answer_of(text: str, pattern: str = ANSWER) -> str | None:
    """Return the answer that a text states: the last match of `pattern`; None where there is no match.

    The answer is the pattern's first group, or the whole match where it has no group, without white space around it and
    without the period at its end.

    Raises:
        OptionError: `pattern` is not a regular expression.

    >>> answer_of("2 + 2 is 4.\\nAnswer: 4.")
    '4'
    >>> answer_of("I don't know") is None
    True
    """
    matches = list(answer_pattern(pattern).finditer(text[-_MOST_CHARS:]))
    if not matches:
        return None
    last = matches[-1]
    return (last[1 if last.re.groups else 0] or "").strip().rstrip(".")


def answer_pattern(pattern: str) -> re.Pattern[str]:
    """Return an answer pattern compiled (OptionError where it is no regular expression)."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError, TypeError) as error:
        raise OptionError("answer", pattern, f"it must be a regular expression ({error})") from error


def shares(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> dict[str, float]:
    """Return each answer's share of the votes, 0 to 1, in the order of their first texts; texts without one don't vote.

    Args:
        answers: By text, its answer.
        weights: By text, how much its vote counts, from 0; None for 1 each.

    >>> shares(["4", "5", None, "4"])
    {'4': 0.6666666666666666, '5': 0.3333333333333333}
    """
    weight_of: dict[str, float] = {}
    for answer, weight in zip(answers, weights or [1.0] * len(answers), strict=True):
        if answer is not None:
            weight_of[answer] = weight_of.get(answer, 0.0) + weight
    total = sum(weight_of.values())
    return {answer: weight / total if total > 0 else 0.0 for answer, weight in weight_of.items()}


def voted(answers: Sequence[str | None], weights: Sequence[float] | None = None) -> int:
    """Return the place of the first text with the answer that has most votes; of equals the one that came first.

    Where no text has an answer, the first text is chosen.

    >>> voted(["5", "4", "4"]), voted(["5", "4"]), voted([None, None])
    (1, 0, 0)
    """
    if not (by_answer := shares(answers, weights)):
        return 0
    return answers.index(max(by_answer, key=by_answer.__getitem__))


def votes_said(answers: Sequence[str | None], place: int) -> str:
    """Return how many votes the answer of a text has, as part of a sentence.

    >>> votes_said(["4", "5", None, "4"], 0), votes_said([None], 0)
    ('its answer, 4, has 2 of 3 votes', 'no text states an answer')
    """
    answer = answers[place]
    if answer is None:
        return "no text states an answer"
    n_voters = sum(each is not None for each in answers)
    return f"its answer, {answer:.60}, has {answers.count(answer)} of {counted(n_voters, 'vote')}"


def is_decided(answers: Sequence[str | None], n_more: int) -> bool:
    """Return whether `n_more` further texts can't change which answer has most votes.

    >>> is_decided(["4", "4", "5"], 1), is_decided(["4", "4"], 1)
    (False, True)
    """
    counts = sorted((answers.count(answer) for answer in set(answers) - {None}), reverse=True)
    first, second = [*counts, 0, 0][:2]
    return first > 0 and first - second > n_more
