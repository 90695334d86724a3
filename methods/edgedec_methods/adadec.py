"""AdaDec: where the entropy is high, a short look-ahead decides between the most probable tokens.

Written for code, where one wrong token at an unsure position spoils a function. Elsewhere decoding is greedy. The
entropy from which a position is unsure is fitted to each model (THRESHOLDS). The winner's look-ahead is not thrown
away: its tokens up to the next unsure position are greedy decoding's own.

Paper: AdaDec, arXiv:2506.08980
Option: `--method adadec:3`, with the tokens that are compared at a position
For: code without tests
Measured: fitted to 52 source files, the 135M's threshold is 3.09 bits; on 50 others right and wrong tokens, weighed
    alike, are on their side of it in 0.76 of cases, of 1 bit in 0.71 (`python benchmarks/answers/stop_unsure.py read
    smollm2-135m --work FOLDER`, then `fit --together smollm2-135m`). With 1 bit the 1.5B has 6 of 30 functions right
    for 54 plain steps; 8 texts and the tests 16 of these for 67, p = 0.002 (`python
    benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind functions --method adadec --tasks 30`)
Status: study
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec.choosing.partial_texts import PartialText, PartialTexts, best_tokens
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec.errors import OptionError
from edgedec.logit_ops import NUMPY_ROW_OPS, entropy_of
from edgedec.model_card import ModelCard
from edgedec_methods.arbitrage import logistic_weights
from edgedec_methods.unsure import Shape

THRESHOLDS: Mapping[Shape, float] = {("llama", 30, 576): 3.09}  # smollm2-135m
"""What `benchmarks/answers/stop_unsure.py fit` found, by the shape of the model."""
GENERAL = 1.0
"""For other models; fitted_threshold() fits one to a model."""
_RIDGE = 1e-3


@dataclass(frozen=True, slots=True)
class LookAhead:
    """When and how far to look ahead.

    Attributes:
        entropy: Entropy in bits from which a position is unsure; infinity makes decoding greedy.
        n_candidates: How many of the most probable tokens are compared, 1 to 16; 1 makes decoding greedy.
        n_tokens: Tokens of a look-ahead, the candidate included, 1 to 64.
    """

    entropy: float = GENERAL
    n_candidates: int = 3
    n_tokens: int = 5

    def __post_init__(self) -> None:
        if not self.entropy >= 0:
            raise OptionError("entropy", self.entropy, "it must be from 0")
        if not 1 <= self.n_candidates <= 16:
            raise OptionError("n_candidates", self.n_candidates, "it must be from 1 to 16")
        if not 1 <= self.n_tokens <= 64:
            raise OptionError("n_tokens", self.n_tokens, "it must be from 1 to 64")

    def is_unsure(self, text: PartialText) -> bool:
        """Return whether the next token of a text is unsure."""
        return entropy_of(text.logits, NUMPY_ROW_OPS) >= self.entropy


def fitted_threshold(entropies: NDArray[np.float64], is_best: NDArray[np.bool_]) -> float:
    """Return the entropy in bits from which a model's most probable token is wrong more often than right.

    It is where a logistic function of the entropy is one half, fitted to as many right tokens as wrong ones: the larger
    class is thinned evenly.

    Args:
        entropies: f64[n], of the rows over texts that are right.
        is_best: bool[n], whether the text has the row's most probable token.

    Raises:
        OptionError: No token is the best one, or all are, or a high entropy is no sign of a wrong one.
    """
    sides = [np.flatnonzero(is_best), np.flatnonzero(~is_best)]
    n, slope, bias = min(map(len, sides)), 0.0, 0.0
    places = np.concatenate([side[np.linspace(0, len(side) - 1, n).round().astype(np.int64)] for side in sides])
    if n:
        x = np.column_stack([entropies[places], np.ones(2 * n)])
        slope, bias = logistic_weights(x, is_best[places].astype(np.float64), np.full(2, _RIDGE)).tolist()
    if not slope < 0:
        raise OptionError("is_best", n, "there must be right and wrong tokens, and fewer right ones at high entropies")
    return -bias / slope


def reranked(texts: PartialTexts, ahead: LookAhead) -> PartialText:
    """Return a text that is decoded greedily, but for unsure positions; nothing was begun in `texts`.

    At an unsure position, each candidate is continued greedily; the one whose tokens have the highest mean
    log-probability is taken (of equals the most probable one).
    """
    text = texts.begin()
    while text.ended is None:
        if ahead.n_candidates > 1 and ahead.is_unsure(text):
            text = _winner(texts, text, ahead)
        else:
            (text,) = texts.advance([(text, best_tokens(text.logits, 1)[0])])
    return text


def _winner(texts: PartialTexts, text: PartialText, ahead: LookAhead) -> PartialText:
    """Return the text with the winning candidate, and with its look-ahead up to the next unsure position."""
    base = texts.fork(text)
    tries = texts.advance([(text, token_id) for token_id in best_tokens(text.logits, ahead.n_candidates)])
    sure = list(tries)  # by candidate, its text before the next unsure position
    open_ended = set(range(len(tries)))
    for _ in range(ahead.n_tokens - 1):
        going = [i for i, each in enumerate(tries) if each.ended is None]
        open_ended -= {i for i in going if ahead.is_unsure(tries[i])}
        grown = texts.advance([(tries[i], best_tokens(tries[i].logits, 1)[0]) for i in going])
        for i, each in zip(going, grown, strict=True):
            tries[i] = each
            if i in open_ended:
                sure[i] = each

    def mean(i: int) -> float:
        return (tries[i].logprob - base.logprob) / (tries[i].n_scored - base.n_scored)

    best = max(range(len(tries)), key=mean)
    texts.drop(*(each for i, each in enumerate(tries) if i != best))
    if sure[best] is tries[best]:
        texts.drop(base)
        return tries[best]
    texts.drop(tries[best])
    winners = sure[best]
    return texts.extend(base, winners.token_ids[len(base.token_ids) :], winners.logprob - base.logprob)


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    entropy = threshold_of(run.asked.model.card)
    return SearchResult((reranked(texts, LookAhead(entropy, run.n)),), 0, "it is the one text")


def threshold_of(card: ModelCard) -> float:
    """Return the entropy in bits from which a model's next token is unsure."""
    return THRESHOLDS.get((card.architecture, card.n_layer, card.n_embd), GENERAL)


ADADEC = Search(_run, n=3, most=16, n_texts=lambda n: n + 1)
"""`n` is the number of tokens that are compared at a position."""
