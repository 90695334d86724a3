"""Particle filtering: N texts are written step by step; after each step they are drawn anew by their scores.

A text with a high score is continued by several particles, one with a low score by none. With as
many particles as one likes, the texts come to be distributed as the model's law times the product of their weights.

Paper: A Probabilistic Inference Approach to Inference-Time Scaling of LLMs using Particle-Based Monte Carlo Methods,
    arXiv:2502.01618
Option: `--method particles:8`, with the particles
For: texts in steps, with a scorer of steps
Measured: 26 of 30 word problems right with 4 particles, the model's own judgement and a vote, for 98 plain steps; the
    likeliest of 4 texts has 26, too, for 60 (`python benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b
    --kind arithmetic --method particles4 --scorer judge --tasks 30 --out FILE`)
Status: study
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.scorer import TextScorer
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec.errors import OptionError
from edgedec_methods.sampled_steps import Steps, forks, seeds_from, steps_of, write_steps
from edgedec_methods.step_scores import elected, scorer_of

MOST_PARTICLES = 256
Weight = Literal["score", "odds"]


@dataclass(frozen=True, slots=True)
class Particles:
    """What particle filtering ends with.

    Attributes:
        texts: The texts; several may say the same.
        scores: By text, its last score, 0 to 1.
        n_rounds: How many steps were written.
    """

    texts: tuple[PartialText, ...]
    scores: tuple[float, ...]
    n_rounds: int

    @property
    def best(self) -> PartialText:
        """The text with the highest last score; of equals the first."""
        return self.texts[max(range(len(self.texts)), key=self.scores.__getitem__)]


def filtered(
    texts: PartialTexts, n: int, steps: Steps, scorer: TextScorer, *, weight: Weight = "odds", most_rounds: int = 1000
) -> Particles:
    """Return n texts that were written step by step, drawn anew by their scores after each step.

    A text that has ended takes part in the drawing with its last score until all have ended. With n = 1 the text is the
    one that its seed writes plainly, whatever the scores.

    Args:
        texts: Who holds them; nothing was begun there.
        n: Particles, 1 to MOST_PARTICLES.
        steps: How steps are written.
        scorer: Scores all texts after each step.
        weight: "odds" for s / (1 - s), the paper's exp(logit); "score" for s itself.
        most_rounds: Most steps.

    Raises:
        OptionError: n is out of range.
        What the scorer raises.
    """
    if not 1 <= n <= MOST_PARTICLES:
        raise OptionError("n", n, f"it must be from 1 to {MOST_PARTICLES} particles")
    live, rng = forks(texts, texts.begin(), n), np.random.default_rng(steps.seed)
    scores, n_rounds = [0.0] * n, 0
    while any(text.ended is None for text in live) and n_rounds < most_rounds:
        # One particle keeps its own seed, as nothing is drawn anew.
        seeds = seeds_from(steps.seed, n, n_rounds if n > 1 else 0)
        live = write_steps(texts, live, steps.params, seeds, separator=steps.separator, most=steps.most)
        scores = scorer(texts, live)
        n_rounds += 1
        if n > 1:
            drawn = resampled(weights_of(scores, weight), rng)
            live, scores = _redrawn(texts, live, drawn), [scores[i] for i in drawn]
    return Particles(tuple(live), tuple(scores), n_rounds)


def weights_of(scores: Sequence[float], weight: Weight) -> NDArray[np.float64]:
    """Return f64[n], the weights of texts; their sum is 1.

    Where every weight is 0, all texts count the same.

    >>> weights_of([0.75, 0.5], "odds"), weights_of([0.75, 0.25], "score"), weights_of([0.0, 0.0], "score")
    (array([0.75, 0.25]), array([0.75, 0.25]), array([0.5, 0.5]))
    """
    weights = np.array(scores, np.float64)
    if weight == "odds":
        weights = np.minimum(weights, 1 - 1e-12)
        weights = weights / (1 - weights)
    total = float(weights.sum())
    return weights / total if total > 0 and math.isfinite(total) else np.full(len(weights), 1 / len(weights))


def resampled(weights: NDArray[np.float64], rng: np.random.Generator) -> list[int]:
    """Return n places drawn by weights that sum to 1, by systematic resampling: each place about n * weight times.

    One random number places n equally spaced marks, so a place with weight w is drawn at least floor(n w) times
    (Kitagawa 1996). The expected number of draws is n w exactly.
    """
    n = len(weights)
    marks = (rng.random() + np.arange(n)) / n
    places = np.searchsorted(np.cumsum(weights), marks, side="right")
    return [int(place) for place in np.minimum(places, int(np.flatnonzero(weights)[-1]))]


def _redrawn(texts: PartialTexts, live: Sequence[PartialText], drawn: Sequence[int]) -> list[PartialText]:
    """Return the texts at the drawn places, forked where drawn again; those that were not drawn are dropped."""
    texts.drop(*(text for i, text in enumerate(live) if i not in drawn))
    survivors, counts = list[PartialText](), Counter[int]()
    for i in drawn:
        survivors.append(texts.fork(live[i]) if counts[i] else live[i])
        counts[i] += 1
    return survivors


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    best = filtered(texts, run.n, steps_of(run), scorer_of(run))
    return elected(texts, best.texts, best.scores, run)


PARTICLES = Search(_run, n=8, most=64, n_texts=lambda n: 2 * n, draws=True, scored="may")
"""`n` is the number of particles; the text with the caller's highest last score is chosen, else the vote."""
