"""Scorers of steps: likelihood, or a probe, says how good the texts of a search are, and costs no forward.

Both look at the logits that the writing left. Likelihood is that of all tokens of a text, or of its last step. The
probe is a logistic function of the logits, which are linear in the state behind the last layer; a script fits it to
texts of known outcome. Here is also how a search chooses by scores, or by a vote.

Paper: after Language Models (Mostly) Know What They Know (its P(IK)), arXiv:2207.05221
Option: `scorer=likely`, `likely:last` or `probe:FILE` of a search
For: texts in steps, without a checker
Measured: of 17 word problems of the 1.5B, within tasks, steps have an AUROC of 0.50 (0.40 to 0.65) by likelihood and
    0.49 (0.37 to 0.58) by a probe of 2,108 steps of 68 others; whole texts 0.81 (0.59 to 0.96), 0.78 (0.59 to 0.94)
    (`python benchmarks/answers/step_scorers.py table FILE --probe PROBE`)
Status: study
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.choosing.partial_texts import AskedPrompt, PartialText, PartialTexts
from edgedec.choosing.scorer import ScorerKind, TextScorer
from edgedec.choosing.search_by import SearchResult, SearchRun
from edgedec.choosing.vote import answer_of, voted, votes_said
from edgedec.errors import OptionError, RequestError
from edgedec_methods.judgement import JudgeScorer, question_about

N_LOGITS = 1024
"""Numbers that a probe reads: so many logits, evenly over the vocabulary, each less the mean of all."""
_MOST_BYTES = 1_000_000


class Likelihood:
    """Implements TextScorer by the log-probabilities of a text's own tokens: exp of their mean, 0 to 1."""

    def __init__(self, *, last_step: bool = False) -> None:
        """Score all of a text, or its last step: what it has behind the longest one of its beginnings scored before."""
        self._last_step = last_step
        self._scored: dict[tuple[int, ...], PartialText] = {}
        self._scores: dict[tuple[tuple[int, ...], int], float] = {}

    def __call__(self, texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        """Return the geometric mean of the probabilities of each text's tokens."""
        scores = [self._score(text) for text in live]
        self._scored |= {text.token_ids: text for text in live if text.ended is None}
        return scores

    def _score(self, text: PartialText) -> float:
        key = text.token_ids, text.n_scored
        if key not in self._scores:
            before = None if not self._last_step else self._beginning(text)
            logprob = text.logprob - (0.0 if before is None else before.logprob)
            n = text.n_scored - (0 if before is None else before.n_scored)
            self._scores[key] = min(1.0, math.exp(logprob / max(1, n)))
        return self._scores[key]

    def _beginning(self, text: PartialText) -> PartialText | None:
        """Return the longest beginning of a text that was scored before; None where there is none.

        A text that an end token ended has the tokens of the one before, and one scored token more.
        """
        begins = (self._scored.get(text.token_ids[:n]) for n in range(len(text.token_ids), -1, -1))
        return next((each for each in begins if each is not None and each.n_scored < text.n_scored), None)


@dataclass(frozen=True, slots=True)
class Probe:
    """Implements TextScorer by a logistic function of the logits behind a text, which are linear in its last state.

    Attributes:
        weights: f64[N_LOGITS].
        bias: What is added to their sum.
    """

    weights: NDArray[np.float64]
    bias: float

    def __call__(self, texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        """Return the fitted chance that each text ends well."""
        return [1 / (1 + math.exp(-self._sum(probed(text.logits)))) for text in live]

    def _sum(self, x: NDArray[np.float64]) -> float:
        return float(np.clip(x @ self.weights + self.bias, -500, 500))


def probed(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return f64[N_LOGITS], what a probe reads of f32[n_vocab]."""
    at = np.linspace(0, len(logits) - 1, N_LOGITS).astype(np.int64)
    read: NDArray[np.float64] = logits[at].astype(np.float64) - float(logits.mean(dtype=np.float64))
    return read


def _likely(value: str) -> Callable[[AskedPrompt], TextScorer]:
    """Return what opens the likelihood of a text, or of its last step; each search has one of its own."""
    if value not in ("", "last"):
        raise OptionError("scorer", f"likely:{value}", "it must be likely (of all tokens), or likely:last (of a step)")
    return lambda asked: Likelihood(last_step=value == "last")


def _judge(value: str) -> Callable[[AskedPrompt], TextScorer]:
    """Return what opens the model's own judgement of a text, which costs the rows of a question."""
    if value:
        raise OptionError("scorer", f"judge:{value}", "it must be judge")
    return lambda asked: JudgeScorer(question_about(asked))


def _probe(path: str) -> Callable[[AskedPrompt], TextScorer]:
    """Return what opens the probe in a file of benchmarks/answers/step_scorers.py."""
    wrong = OptionError(
        "scorer", f"probe:{path}", "fit a probe by benchmarks/answers/step_scorers.py, and give its file"
    )
    try:
        with Path(path).open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
        values: Any = json.loads(data) if len(data) <= _MOST_BYTES else None
        weights, bias, n_vocab = np.array(values["weights"], np.float64), float(values["bias"]), values["n_vocab"]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise wrong from error
    if weights.shape != (N_LOGITS,) or not np.isfinite([*weights, bias]).all():
        raise wrong

    def opened(asked: AskedPrompt) -> TextScorer:
        if asked.model.card.n_vocab != n_vocab:
            raise RequestError(
                f"the probe {path} was fitted to a model with {n_vocab} tokens, and {asked.model.card.name!r} has "
                f"{asked.model.card.n_vocab}; fit one to this model"
            )
        return Probe(weights, bias)

    return opened


LIKELY, JUDGED, PROBE = ScorerKind(_likely), ScorerKind(_judge), ScorerKind(_probe)


def scorer_of(run: SearchRun) -> TextScorer:
    """Return the caller's scorer of a search; where none was given, the likelihood of a text."""
    return run.scorer or Likelihood()


def elected(
    texts: PartialTexts, candidates: Sequence[PartialText], scores: Sequence[float], run: SearchRun
) -> SearchResult:
    """Return the text with the caller's highest score; without the caller's scores, the one that the vote chooses.

    Args:
        texts: Who holds the texts.
        candidates: The texts that the search ends with.
        scores: By text, its score; empty where nothing scored them. They count where the caller gave the scorer, and
            where no text states an answer.
        run: What the search runs with.
    """
    answers = [answer_of(texts.text(text), run.answer) for text in candidates]
    if run.scorer is not None or (scores and not any(answers)):
        place = max(range(len(candidates)), key=scores.__getitem__)
        why = f"its score, {scores[place]:.3f}, is the highest of {len(candidates)}"
    else:
        place = voted(answers)
        why = votes_said(answers, place)
    return SearchResult(tuple(candidates), place, why, tuple(scores))
