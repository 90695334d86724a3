"""The figures of trials. A time is the sum over the prompts of the median over a prompt's repetitions."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from edgedec_apps.bench.measure import AGAIN, PLAIN, SPECULATIVE, Trial
from edgedec_apps.bench.prompts import grouped

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Totals:
    """The totals of one way to decode over a set of prompts, each counted once.

    Attributes:
        n_decoded: Tokens after the first of each prompt.
        decode_s: Seconds after the first token of each prompt.
        request_s: Seconds of the whole requests.
    """

    n_decoded: float
    decode_s: float
    request_s: float

    @property
    def tok_s(self) -> float | None:
        """Tokens after the first, per second after the first."""
        return ratio(self.n_decoded, self.decode_s)


def ratio(a: float, b: float) -> float | None:
    """Return a / b; None unless both are above 0.

    >>> ratio(3.0, 2.0), ratio(3.0, 0.0), ratio(0.0, 1.0)
    (1.5, None, None)
    """
    return a / b if a > 0 and b > 0 else None


def by_prompt(trials: Sequence[Trial]) -> list[list[Trial]]:
    """Return the trials of each prompt."""
    return list(grouped(trials, lambda trial: trial.request.id).values())


def totals(trials: Sequence[Trial], way: str) -> Totals:
    """Return the totals of a way: for each prompt the median of its repetitions, summed."""
    n_decoded = decode_s = request_s = 0.0
    for group in by_prompt(trials):
        runs = [trial.runs[way] for trial in group]
        n_decoded += median(run.n_decoded for run in runs)
        decode_s += median(run.decode_s for run in runs)
        request_s += median(run.total_s for run in runs)
    return Totals(n_decoded, decode_s, request_s)


def figures(trials: Sequence[Trial]) -> Figures:
    """Return the figures of a set of trials, one task's or all.

    "speedup" compares the times after the first tokens, "request_speedup" those of whole requests, which include a
    drafter's work on the prompt. "accepted_per_step" counts accepted draft tokens per forward after the prefill.
    """
    ours, plain = totals(trials, SPECULATIVE), totals(trials, PLAIN)
    runs = [trial.runs[SPECULATIVE] for trial in trials]
    n_steps = sum(run.n_steps for run in runs)
    return {
        "tok_s": ours.tok_s,
        "plain_tok_s": plain.tok_s,
        "speedup": ratio(plain.decode_s, ours.decode_s),
        "identical": not differing(trials),
        "accepted_per_step": sum(run.n_accepted for run in runs) / n_steps if n_steps else None,
        "request_speedup": ratio(plain.request_s, ours.request_s),
        "first_token_s": median(run.first_token_s for run in runs) if runs else None,
        "plain_first_token_s": median(trial.runs[PLAIN].first_token_s for trial in trials) if trials else None,
        "n_prompts": len({trial.request.id for trial in trials}),
        "n_rounds": max((trial.round for trial in trials), default=-1) + 1,
    }


def differing(trials: Sequence[Trial]) -> list[str]:
    """Return the ids of the prompts where a speculative run has other tokens than the plain run of its trial."""
    wrong = (trial for trial in trials if trial.runs[SPECULATIVE].token_ids != trial.runs[PLAIN].token_ids)
    return list(dict.fromkeys(trial.request.id for trial in wrong))


def noise(trials: Sequence[Trial]) -> Figures:
    """Return the noise: the ratio of the two plain runs over all prompts, and its spread.

    "lowest" and "highest" are the extreme ratios of one round of one task, in which a task's speedup is measured;
    "spread" is their difference.
    """
    rounds = grouped(trials, lambda trial: (trial.request.task, trial.round))
    ratios = [ratio for group in rounds.values() if (ratio := _plain_ratio(group)) is not None]
    lowest, highest = (min(ratios), max(ratios)) if ratios else (None, None)
    spread = highest - lowest if highest is not None and lowest is not None else None
    return {"ratio": _plain_ratio(trials), "spread": spread, "lowest": lowest, "highest": highest}


def _plain_ratio(trials: Sequence[Trial]) -> float | None:
    return ratio(totals(trials, PLAIN).decode_s, totals(trials, AGAIN).decode_s)


def worst_prompt(trials: Sequence[Trial]) -> tuple[str | None, float | None]:
    """Return the prompt with the least speedup, and that speedup; None for both without a text of two tokens."""
    ratios: list[tuple[float, str]] = []
    for group in by_prompt(trials):
        plain = totals(group, PLAIN)
        speedup = ratio(plain.decode_s, totals(group, SPECULATIVE).decode_s)
        if speedup is not None and plain.n_decoded:
            ratios.append((speedup, group[0].request.id))
    speedup, name = min(ratios, default=(None, None))
    return name, speedup


def reasons(trials: Sequence[Trial]) -> list[str]:
    """Return why drafting was off, each reason once."""
    return list(dict.fromkeys(reason for trial in trials for reason in trial.runs[SPECULATIVE].reasons))


def summarize(trials: Sequence[Trial]) -> Figures:
    """Return the figures over all prompts and by task."""
    tasks = grouped(trials, lambda trial: trial.request.task)
    name, speedup = worst_prompt(trials)
    return {
        "all": figures(trials),
        "tasks": {task: figures(group) for task, group in tasks.items()},
        "noise": noise(trials),
        "worst_prompt_speedup": speedup,
        "worst_prompt": name,
        "differing_prompts": differing(trials),
        "reasons": reasons(trials),
    }
