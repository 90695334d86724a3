"""Compute-optimal choice: the method is chosen by how hard a prompt is, after the scores of a few first texts.

Easy prompts need few texts, hard ones a search. Which method is best at which difficulty is measured, not known:
`fitted` makes the table of measured outcomes.

Paper: Scaling LLM Test-Time Compute Optimally can be More Effective than Scaling Model Parameters, arXiv:2408.03314
Option: Python only, `method_for`
For: many prompts of one kind, of which some were measured
Measured: 84 % of 50 word problems right for 199 plain steps, which greedy decoding has for 52; 46 % of 50 functions
    for 82 (`python benchmarks/answers/better_answers.py table`)
Status: study
"""

from collections.abc import Sequence
from statistics import fmean

from edgedec.errors import OptionError

Table = Sequence[tuple[float, str]]
"""Pairs of the least mean score and the method from there on, the greatest score first; the last one begins at 0."""


def method_for(scores: Sequence[float], table: Table) -> str:
    """Return the method for a prompt whose first texts have these scores, 0 to 1.

    Raises:
        OptionError: There are no scores, or the table does not go down to 0.

    >>> table = [(0.9, "one"), (0.4, "vote"), (0.0, "particles")]
    >>> method_for([1.0, 0.9], table), method_for([0.5, 0.5], table), method_for([0.0, 0.1], table)
    ('one', 'vote', 'particles')
    """
    bounds = [least for least, _ in table]
    if not bounds or bounds[-1] != 0 or bounds != sorted(bounds, reverse=True):
        raise OptionError("table", list(table), "it must hold falling scores, the last of them 0")
    if not scores:
        raise OptionError("scores", scores, "it must hold the score of at least one text")
    mean = fmean(scores)
    return next(name for least, name in table if mean >= least)


def fitted(outcomes: Sequence[tuple[float, str, float]], bounds: Sequence[float]) -> list[tuple[float, str]]:
    """Return the table of the methods that did best on measured prompts, by difficulty.

    Args:
        outcomes: (mean first score of a prompt, method, accuracy there, 0 to 1).
        bounds: Falling least scores of the table's rows, the last one 0; a row without outcomes is left out, and the
            row above it holds for its prompts, too, where it is the last.

    Raises:
        OptionError: There are no outcomes, or none is in a row.

    >>> fitted([(0.9, "one", 1.0), (0.9, "vote", 0.8), (0.2, "vote", 0.5), (0.1, "one", 0.1)], [0.5, 0.0])
    [(0.5, 'one'), (0.0, 'vote')]
    """
    table = list[tuple[float, str]]()
    top = float("inf")
    for least in bounds:
        inside = [(name, accuracy) for mean, name, accuracy in outcomes if least <= mean < top]
        names = dict.fromkeys(name for name, _ in inside)
        if names:
            best = max(names, key=lambda name: fmean(value for each, value in inside if each == name))
            table.append((least, best))
            top = least
    if not table:
        raise OptionError("outcomes", len(outcomes), "some must have a first score in a row of the table")
    return [*table[:-1], (0.0, table[-1][1])]
