"""Arbitrage: a small model writes the steps, and a router asks the large one where its step is likely to be better.

SpecReason lets the large model grade every step, so it reads every step. Here a router looks at the small model's own
rows: the chance that the large model's step would turn a wrong answer into a right one is a logistic function of how
sure the small model was. Where that chance is below a threshold, the step stays, and the large model reads nothing;
else the large model reads what it missed and writes the step instead. `fitted_router` fits the router to measured steps
(`benchmarks/answers/arbitrage.py` measures them on made tasks).

Lossy: nothing verifies the steps that stay. The models may have different vocabularies: `translation` hands steps over
as text then.

Paper: Arbitrage: Efficient Reasoning via Advantage-Aware Speculation, arXiv:2512.05033
Option: Python only, `arbitrated`
For: a small model that is right in most steps, and seldom knows less than it seems to
Measured: 6 of 20 word problems right with 31 % of the steps by the 1.5B, and 5 with as many steps drawn at random;
    the 0.5B alone has 0 and the 1.5B alone 16, in 0.89 of the time (`python benchmarks/answers/arbitrage.py try
    qwen2.5-coder-0.5b qwen2.5-coder-1.5b --kind arithmetic --seed 1 --tasks 20 --random 1 --router ROUTER --out FILE`)
Status: study
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.errors import OptionError, RequestError
from edgedec.logit_ops import NUMPY_ROW_OPS, entropy_of
from edgedec.tokenizer import Tokenizer
from edgedec_methods.sampled_steps import Steps, next_step

FEATURES = ("mean log-probability of the step", "nats before it", "nats behind it", "log tokens", "steps before it")
_RIDGE = 1.0
_ITERATIONS = 30

Ids = Sequence[int]


@dataclass(frozen=True, slots=True)
class Router:
    """Says how likely it is that the large model's step would be better.

    Attributes:
        weights: One for each of FEATURES.
        bias: What is added to their sum.
    """

    weights: tuple[float, ...]
    bias: float

    def chance(self, features: Sequence[float] | NDArray[np.float64]) -> float:
        """Return the chance, 0 to 1, for the features of a step."""
        z = self.bias + sum(w * x for w, x in zip(self.weights, features, strict=True))
        return 1 / (1 + math.exp(-min(max(z, -500.0), 500.0)))


class Translation(NamedTuple):
    """How tokens of a step are handed from one model to the other.

    Attributes:
        to_large: `(token_ids)` of the small model -> those of the large one.
        to_small: The other way.
    """

    to_large: Callable[[Ids], Ids]
    to_small: Callable[[Ids], Ids]


@dataclass(frozen=True, slots=True)
class Arbitrated:
    """What two models wrote.

    Attributes:
        text: The text, as the small model holds it.
        chances: By step, the router's chance that the large model's step would be better.
        steps_kept: For each step, whether it stayed as the small model wrote it.
        n_large: How many tokens the large model wrote.
        n_without_room: How many steps stayed because the large model, which was asked for them, had no room left.
    """

    text: PartialText
    chances: tuple[float, ...]
    steps_kept: tuple[bool, ...]
    n_large: int
    n_without_room: int = 0


def translation(small: Tokenizer, large: Tokenizer) -> Translation:
    """Return the translation between two vocabularies: a step is decoded and encoded again.

    A character whose bytes lie in two steps becomes the replacement character.
    """
    return Translation(
        lambda token_ids: _encoded(large, small.decode(token_ids)),
        lambda token_ids: _encoded(small, large.decode(token_ids)),
    )


def _encoded(tokenizer: Tokenizer, words: str) -> Ids:
    """Return words in the middle of a text as tokens; some tokenizers put a space before the words of a beginning."""
    line_end = tokenizer.encode("\n", add_special=False)
    token_ids = tokenizer.encode(f"\n{words}", add_special=False)
    if token_ids[: len(line_end)] == line_end:
        return token_ids[len(line_end) :]
    return tokenizer.encode(words, add_special=False)


def step_features(before: PartialText, after: PartialText, n_steps: int) -> NDArray[np.float64]:
    """Return f64[5], FEATURES of the step that leads from one text to another, behind `n_steps` steps."""
    n = max(1, after.n_scored - before.n_scored)
    mean = (after.logprob - before.logprob) / n
    return np.array([mean, _nats(before.logits), _nats(after.logits), math.log(n), n_steps])


def fitted_router(features: NDArray[np.float64], better: Sequence[bool]) -> Router:
    """Fit a router to measured steps by logistic regression. A ridge penalty keeps the weights of the features small.

    Args:
        features: f64[n, 5], of each step.
        better: For each step, whether the large model's step made the answer right and the small model's made it wrong.

    Raises:
        OptionError: There are no steps, or not as many labels.
    """
    n = len(features)
    if not n or n != len(better):
        raise OptionError("better", len(better), f"there must be a label for each of the {n} steps, at least one")
    means, scales = features.mean(axis=0), features.std(axis=0)
    scales = np.where(scales > 1e-9, scales, 1.0)
    x = np.hstack([(features - means) / scales, np.ones((n, 1))])
    w = logistic_weights(x, np.array(better, float), np.array([_RIDGE] * features.shape[1] + [1e-6]))
    weights = w[:-1] / scales
    return Router(tuple(map(float, weights)), float(w[-1] - weights @ means))


def logistic_weights(x: NDArray[np.float64], y: NDArray[np.float64], ridge: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return f64[m], the weights of a logistic regression, by Newton's method.

    Args:
        x: f64[n, m], the features.
        y: f64[n], 1 for what happened and 0 for what did not.
        ridge: f64[m], what each weight's square costs, halved.
    """
    w, cost = np.zeros(x.shape[1]), np.diag(ridge)
    for _ in range(_ITERATIONS):
        p = 1 / (1 + np.exp(-np.clip(x @ w, -30, 30)))
        w -= np.linalg.solve(x.T @ (x * (p * (1 - p) + 1e-9)[:, None]) + cost, x.T @ (p - y) + cost @ w)
    return w


def arbitrated(
    small: PartialTexts,
    large: PartialTexts,
    steps: Steps,
    router: Router,
    *,
    threshold: float = 0.5,
    between: Translation | None = None,
) -> Arbitrated:
    """Write a text step by step: the small model writes each step, or the large one where the router asks it to.

    Args:
        small: Holds the small model's text; nothing was begun there.
        large: Holds the large model's text; nothing was begun there.
        steps: How steps are written, by either model.
        router: Says how likely it is that the large model's step is better.
        threshold: The least chance for which the large model writes the step; with 0 it writes every step.
        between: How steps are handed over; None for models of one vocabulary.

    Raises:
        OptionError: The threshold is out of range.
        RequestError: The prompt is not the same tokens for both models, and `between` is None.
    """
    if not 0 <= threshold <= 1:
        raise OptionError("threshold", threshold, "it must be from 0 to 1")
    if between is None and small.prompt_ids != large.prompt_ids:
        raise RequestError("the two models read the prompt as different tokens; give a translation between them")
    over = between or Translation(list, list)
    quick, sure, n_read, n_large, n_without_room = small.begin(), large.begin(), 0, 0, 0
    chances, accepted = list[float](), list[bool]()
    while quick.ended is None:
        before = small.fork(quick)
        quick = next_step(small, quick, steps)
        chances.append(router.chance(step_features(before, quick, len(accepted))))
        accepted.append(chances[-1] < threshold)
        if not accepted[-1]:
            sure = large.extend(sure, over.to_large(before.token_ids[n_read:]), 0.0)
            accepted[-1] = sure.ended is not None
            n_without_room += accepted[-1]
        if accepted[-1]:
            small.drop(before)
            continue
        n = len(sure.token_ids)
        sure = next_step(large, sure, steps)
        n_large += len(sure.token_ids) - n
        small.drop(quick)
        quick = small.extend(before, over.to_small(sure.token_ids[n:]), 0.0)
        quick = replace(quick, ended=sure.ended or quick.ended)
        n_read = len(quick.token_ids)
    return Arbitrated(quick, tuple(chances), tuple(accepted), n_large, n_without_room)


def _nats(logits: NDArray[np.float32]) -> float:
    """Return the entropy of a row of logits in nats."""
    return entropy_of(logits, NUMPY_ROW_OPS) * math.log(2)
