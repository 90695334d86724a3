"""A*-decoding: the prefix with the lowest cost, with what is expected to come, goes on until a whole text has it.

A prefix costs the sum of -log score over its steps. What is expected to come is 1 - score, as in the paper, whose cost
of a step may be another one. Without that, the first whole text that is taken from the heap is the cheapest of all that
its steps could lead to.

Paper: A*-Decoding, arXiv:2505.13672
Option: `--method a-star:4`, with the steps that are tried behind a prefix
For: texts in steps, with a scorer of steps
Measured: 12 of 30 word problems right by costs alone and the model's own judgement, for 151 plain steps; the likeliest
    of 4 texts has 26 of these for 60, p = 0.0005 (`python benchmarks/answers/better_answers.py search
    qwen2.5-coder-1.5b --kind arithmetic --method cheapest4 --scorer judge --tasks 30 --out FILE`)
Status: study
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.scorer import TextScorer
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec.errors import OptionError
from edgedec_methods.sampled_steps import Steps, forks, seeds_from, steps_of, unique, write_steps
from edgedec_methods.step_scores import scorer_of

Node = TypeVar("Node")
_LEAST_SCORE = 1e-9
MOST_BRANCHES = 256


@dataclass(frozen=True, slots=True)
class Cheapest(Generic[Node]):
    """What the search ends with.

    Attributes:
        node: The first whole node; None where the expansions were over before there was one.
        n_expanded: How many nodes were expanded.
        left: The nodes that were not taken from the heap, with their costs.
    """

    node: Node | None
    cost: float
    n_expanded: int
    left: tuple[tuple[float, Node], ...]


def cheapest(
    root: Node,
    expand: Callable[[Node], Sequence[tuple[float, Node]]],
    is_whole: Callable[[Node], bool],
    *,
    most_expanded: int,
    at_least: Callable[[Node], float] = lambda node: 0.0,
) -> Cheapest[Node]:
    """Return the first whole node that is taken from the heap (A*; Hart, Nilsson and Raphael 1968).

    Args:
        root: Where the search begins, at cost 0.
        expand: `(node)` -> its children, each with what the step to it costs, from 0.
        is_whole: Tells whether a node is an answer.
        most_expanded: Most nodes to expand.
        at_least: A lower bound of what is still to come behind a node; 0 is always one. Where it is one, the node found
            has the lowest cost of all.
    """
    order = count()
    heap = [(at_least(root), next(order), 0.0, root)]
    n_expanded = 0
    while heap:
        _, _, cost, node = heapq.heappop(heap)
        if is_whole(node):
            return Cheapest(node, cost, n_expanded, tuple((c, left) for _, _, c, left in sorted(heap)))
        if n_expanded == most_expanded:
            heapq.heappush(heap, (cost + at_least(node), next(order), cost, node))
            break
        n_expanded += 1
        for step, child in expand(node):
            heapq.heappush(heap, (cost + step + at_least(child), next(order), cost + step, child))
    return Cheapest(None, math.inf, n_expanded, tuple((c, left) for _, _, c, left in sorted(heap)))


def cost_of(score: float) -> float:
    """Return -log score, at most that of 1e-9.

    >>> cost_of(1.0), round(cost_of(0.5), 3)
    (0.0, 0.693)
    """
    return -math.log(max(score, _LEAST_SCORE)) + 0.0


def most_expansions(n_steps: int) -> int:
    """Return how many prefixes can be expanded, so that their steps, and a fork of each new one, are open at once.

    >>> most_expansions(1), most_expansions(4), most_expansions(64)
    (256, 83, 3)
    """
    return MOST_BRANCHES if n_steps == 1 else (MOST_BRANCHES - 1 - n_steps) // (n_steps - 1)


def a_star(
    texts: PartialTexts,
    n_steps: int,
    steps: Steps,
    scorer: TextScorer,
    *,
    most_expanded: int = 64,
    ahead: float = 1.0,
) -> tuple[PartialText, int]:
    """Return the whole text that is reached first, and how many prefixes were expanded.

    Where the expansions are over before a text is whole, the cheapest prefix is written to its end plainly.

    Args:
        texts: Who holds the texts; nothing was begun there.
        n_steps: How many steps are sampled behind a prefix, 1 to 64; equal ones count once.
        steps: How steps are written.
        scorer: Scores the steps behind a prefix, all at once.
        most_expanded: Most prefixes to expand, 1 to most_expansions(n_steps).
        ahead: What 1 - score is multiplied by, from 0 (costs alone).

    Raises:
        OptionError: A number is out of range.
        What the scorer raises.
    """
    if not 1 <= n_steps <= 64:
        raise OptionError("n_steps", n_steps, "it must be from 1 to 64")
    if not 1 <= most_expanded <= most_expansions(n_steps):
        raise OptionError("most_expanded", most_expanded, f"it must be from 1 to {most_expansions(n_steps)} here")
    n_done, short = count(), dict[PartialText, float]()  # by prefix, what its score lacks

    def expand(parent: PartialText) -> list[tuple[float, PartialText]]:
        seeds = seeds_from(steps.seed, n_steps, next(n_done) if n_steps > 1 else 0)
        written = write_steps(
            texts, forks(texts, parent, n_steps), steps.params, seeds, separator=steps.separator, most=steps.most
        )
        distinct = unique(written)
        texts.drop(*(text for text in written if not any(text is one for one in distinct)))
        scores = scorer(texts, distinct)
        short.update((text, 1 - score) for text, score in zip(distinct, scores, strict=True))
        return [(cost_of(score), text) for score, text in zip(scores, distinct, strict=True)]

    def at_least(text: PartialText) -> float:
        """Return the least cost that is expected behind a prefix: 0 for the root, which was never scored."""
        return ahead * short.get(text, 0.0)

    def is_whole(text: PartialText) -> bool:
        """Return whether a text has ended, in whatever way."""
        return text.ended is not None

    best = cheapest(texts.begin(), expand, is_whole, most_expanded=most_expanded, at_least=at_least)
    left = [text for _, text in best.left]
    if best.node is not None:
        texts.drop(*left)
        return best.node, best.n_expanded
    texts.drop(*left[1:])
    (whole,) = write_steps(texts, left[:1], steps.params, [steps.seed], separator=None)
    return whole, best.n_expanded


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    most = min(64, most_expansions(run.n))
    best, n_expanded = a_star(texts, run.n, steps_of(run), scorer_of(run), most_expanded=most)
    return SearchResult(
        (best,), 0, f"its steps, and what they lack, cost least after {n_expanded} of at most {most} expansions"
    )


A_STAR = Search(_run, n=4, most=16, n_texts=lambda n: 64, draws=True, scored="may")
"""`n` is the number of steps tried behind a prefix; more texts are held where the scores lead astray."""
