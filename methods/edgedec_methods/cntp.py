"""CNTP (cautious next token prediction): where the model is unsure, it tries several continuations.

At a position with a high entropy, several trials are sampled up to the next punctuation mark, and the trial with the
lowest perplexity stays. Where the model is sure, one token is drawn, as always; so it costs only where it is unsure.

Paper: Cautious Next Token Prediction, arXiv:2507.03038
Option: `--method cntp:5`, with the most trials at a position
For: texts that are drawn, where single tokens decide
Measured: 16 of 30 word problems right for 50 plain steps; the likeliest of 4 texts has 26 of these for 60, p = 0.002
    (`python benchmarks/answers/better_answers.py search qwen2.5-coder-1.5b --kind arithmetic --method cntp --tasks 30`)
Status: study
"""

import math
from dataclasses import dataclass

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.search_by import Search, SearchResult, SearchRun
from edgedec.errors import OptionError
from edgedec.logit_ops import NUMPY_ROW_OPS, entropy_of
from edgedec.sampling import Noise, SamplingParams
from edgedec_methods.sampled_steps import drawn, forks

PUNCTUATION = ".,;:!?\n"
MOST_TRIALS = 64


@dataclass(frozen=True, slots=True)
class Caution:
    """How many trials a position gets.

    Attributes:
        most_trials: Trials at an entropy of `high` and above, 1 to MOST_TRIALS; 1 is plain sampling.
        low: Entropy in bits up to which there is one trial.
        high: Entropy in bits from which there are `most_trials`.
        most_tokens: Most tokens of a trial, where no punctuation mark ends it.
    """

    most_trials: int = 5
    low: float = 0.5
    high: float = 3.0
    most_tokens: int = 24

    def __post_init__(self) -> None:
        if not 1 <= self.most_trials <= MOST_TRIALS:
            raise OptionError("most_trials", self.most_trials, f"it must be from 1 to {MOST_TRIALS}")
        if not 0 <= self.low < self.high < math.inf:
            raise OptionError("low", self.low, f"it must be from 0 and below high, which is {self.high:g}")
        if self.most_tokens < 1:
            raise OptionError("most_tokens", self.most_tokens, "it must be from 1")

    def n_trials(self, entropy: float) -> int:
        """Return how many trials a position of this entropy in bits gets.

        >>> [Caution(5, 1.0, 3.0).n_trials(entropy) for entropy in (0.0, 1.0, 2.0, 3.0, 9.0)]
        [1, 1, 3, 5, 5]
        """
        share = min(max((entropy - self.low) / (self.high - self.low), 0.0), 1.0)
        return 1 + math.floor((self.most_trials - 1) * share)


def cautious(texts: PartialTexts, params: SamplingParams, seed: int, caution: Caution) -> PartialText:
    """Return a text that was written with caution; nothing was begun in `texts`.

    Trial k draws with the noise of seed + k, so with one trial the text is the one that the seed writes plainly.
    """
    text = texts.begin()
    while text.ended is None:
        n = caution.n_trials(entropy_of(text.logits, NUMPY_ROW_OPS))
        text = _best_trial(texts, text, params, [Noise(seed + k) for k in range(n)], caution.most_tokens)
    return text


def _best_trial(
    texts: PartialTexts, text: PartialText, params: SamplingParams, noises: list[Noise], most_tokens: int
) -> PartialText:
    """Return the trial with the highest mean log-probability; a single trial is one token."""
    before, start = text.logprob, text.n_scored
    trials = forks(texts, text, len(noises))
    going, n_most = list(range(len(trials))), most_tokens if len(trials) > 1 else 1
    while going:
        choices = [(trials[i], drawn(texts, trials[i], params, noises[i])) for i in going]
        for i, grown in zip(going, texts.advance(choices), strict=True):
            trials[i] = grown
        going = [i for i in going if not _is_over(texts, trials[i], trials[i].n_scored - start, n_most)]
    best = max(trials, key=lambda trial: (trial.logprob - before) / (trial.n_scored - start))
    texts.drop(*(trial for trial in trials if trial is not best))
    return best


def _is_over(texts: PartialTexts, trial: PartialText, n: int, n_most: int) -> bool:
    """Return whether a trial of n tokens ends here."""
    last = texts.decode(trial.token_ids[-1:])
    return trial.ended is not None or n >= n_most or any(mark in last for mark in PUNCTUATION)


def _run(texts: PartialTexts, run: SearchRun) -> SearchResult:
    text = cautious(texts, run.params, run.seed, Caution(most_trials=run.n))
    return SearchResult((text,), 0, "it is the one text")


CNTP = Search(_run, n=5, most=64, n_texts=lambda n: n, draws=True)
"""`n` is the number of trials, at most, at a position."""
