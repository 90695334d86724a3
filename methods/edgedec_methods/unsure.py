"""Unsure stop: a text ends before a token whose chance to be right, by the model's own row of logits, is too small.

In a completion of code a wrong token is worth less than none: what follows it is rarely of use. SEC (Sun et al. 2024,
arXiv:2401.09964) ends the text before such a token. Here a logistic function of three signs of doubt says how likely a
token is the one that a source file has there. benchmarks/answers/stop_unsure.py fits the function.

Paper: Sun et al. 2024, arXiv:2401.09964, whose trained classifier is a logistic function here
Option: `--method stop-unsure:0.7`
For: completions of code, where a wrong token is worth less than none
Measured: of lines shown by the 0.5B with P = 0.5, 0.67 are right instead of 0.17, and half are shown (`python
    benchmarks/answers/stop_unsure.py`; docs/better-answers.md)
Status: opt-in
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.logit_ops import LogitOps, entropy_of
from edgedec.model_card import ModelCard
from edgedec.text_method import EarlyEnd, EndBefore, TextMethod
from edgedec.tokenizer import Tokenizer

Shape = tuple[str, int, int]
"""Architecture, layers, and values of a hidden state."""

_LEAST_P = 1e-6


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a row of logits says about a token that was drawn from it, at temperature 1 and before any transform.

    Attributes:
        p: The probability of the token.
        entropy: The entropy of the row in bits.
        margin: `p` less the probability of the most probable other token; negative for a token that is not the best.
    """

    p: float
    entropy: float
    margin: float

    @classmethod
    def of(cls, row: NDArray[np.float32], token_id: int, ops: LogitOps) -> "Doubt":
        """Return the signs of doubt about a token of a row, f32[n_vocab]; not a number where a logit is not finite."""
        total = ops.total(row)
        best = [int(i) for i in ops.top_k(row, min(2, len(row))) if i != token_id]
        rival = max((float(row[i]) for i in best), default=-math.inf)
        p, other = (math.exp(logit - total.most) / total.weight for logit in (float(row[token_id]), rival))
        return cls(p, entropy_of(row, ops), p - other)

    @property
    def log_odds(self) -> float:
        """log(p / (1 - p)), for a p that is held between 1e-6 and 1 - 1e-6."""
        p = min(max(self.p, _LEAST_P), 1 - _LEAST_P)
        return math.log(p / (1 - p))


@dataclass(frozen=True, slots=True)
class Fit:
    """The coefficients of the logistic function, whose value is the chance that a token is right.

    Attributes:
        bias: Added to every token's log-odds.
        odds: Times log(p / (1 - p)); with 1 here and 0 elsewhere the chance is p itself.
        entropy: Times the entropy.
        margin: Times the margin.
    """

    bias: float
    odds: float
    entropy: float
    margin: float

    def chance(self, doubt: Doubt) -> float:
        """Return the estimated chance that a token is right, 0 to 1; NaN where a sign is not a number.

        >>> round(Fit(0.0, 1.0, 0.0, 0.0).chance(Doubt(0.9, 0.5, 0.8)), 12)
        0.9
        """
        total = self.bias + self.odds * doubt.log_odds + self.entropy * doubt.entropy + self.margin * doubt.margin
        return 1 / (1 + math.exp(-total))


FITS: Mapping[Shape, Fit] = {
    ("qwen2", 24, 896): Fit(0.055, 0.796, -0.129, -0.233),  # qwen2.5-coder-0.5b
    ("qwen2", 28, 1536): Fit(0.065, 0.884, -0.097, -0.332),  # qwen2.5-coder-1.5b
    ("llama", 30, 576): Fit(-0.092, 1.082, 0.053, -0.267),  # smollm2-135m
}
"""What benchmarks/answers/stop_unsure.py found, by the shape of the model (benchmarks/results/stop_unsure.json)."""

GENERAL = Fit(0.069, 0.834, -0.118, -0.276)
"""The fit on both coder models together, for all models without a fit of their own."""


class StopUnsure(TextMethod):
    """The request option stop_unsure."""

    takes = float

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Keep nothing."""

    def early_end(self, value: float | None, card: ModelCard) -> EarlyEnd | None:
        """Return what ends texts before tokens whose chance to be right is below `value`; None for None."""
        return unsure_stop(value, card)


@dataclass(frozen=True, slots=True)
class UnsureStop:
    """Ends a text before a token that is too likely to be wrong.

    Attributes:
        least: The least chance to be right that a token of the text has.
        fit: Estimates the chance.
        note: What a person should know of the fit; may be empty.
    """

    least: float
    fit: Fit
    note: str = ""

    def chance(self, row: NDArray[np.float32], token_id: int, ops: LogitOps) -> float:
        """Return the estimated chance that a token, drawn from a row of logits, is right; NaN for logits that are."""
        return self.fit.chance(Doubt.of(row, token_id, ops))

    def before(self, row: NDArray[np.float32], token_id: int, ops: LogitOps) -> EndBefore | None:
        """Return why a text ends before a token that was drawn from a row of logits; None where it goes on."""
        chance = self.chance(row, token_id, ops)
        if not chance < self.least:
            return None
        why = f"the text ends where the model was unsure: its next token is right with a chance of {chance:.2f}"
        return EndBefore("unsure", chance, why)


def unsure_stop(least: float | None, card: ModelCard) -> UnsureStop | None:
    """Return what ends the texts of a model before tokens whose chance to be right is below `least`; None for None."""
    if least is None:
        return None
    fit = None if card.left_out else FITS.get((card.architecture, card.n_layer, card.n_embd))
    if fit is not None:
        return UnsureStop(least, fit)
    note = "the chance that a token is right was fitted on other models, for completions of Python code"
    return UnsureStop(least, GENERAL, note)
