"""LLaDA, ASS, EOSER, LocalLeap, BACD, FreeDave (and after CD4LM, NAP): rules that read the tokens' probabilities.

They look at how probable the token of each masked position is, now and in earlier passes, and at nothing else of the
rows. A number behind a rule's name is the second argument of its function.

Paper: beside each rule
Option: `--method diffusion:schedule:1`, `ascending:2`, `eoser:0.01`, `adaptive:4`, `local_leap:0.75`, `bounded:0.6`,
    `parallel:4`, `free_dave:3`
For: diffusion language models
Measured: tokens a forward and right ones of 176 made tasks, where `threshold:0.9` has 2.13 and 148: schedule:1 0.75,
    149; ascending 1.49, 112; eoser 1.44, 116; adaptive 1.63, 144; local_leap 2.52, 148; bounded 2.14, 146; parallel
    1.31, 136; free_dave 1.08, 149 (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_ANCHOR, _RADIUS = 0.9, 4  # of LocalLeap
_CAPPED, _BOUND = 0.8, 0.9  # enough for a capped commit; the most that BACD asks for


def schedule(passes: Sequence[Pass], n_tokens: float) -> Chosen:
    """LLaDA (arXiv:2502.09992): commit the `n_tokens` most confident positions; with one, it is plain denoising."""
    return passes[-1].chosen(passes[-1].surest(int(n_tokens)))


def ascending(passes: Sequence[Pass], base: float) -> Chosen:
    """ASS (arXiv:2509.23924): commit in pass i the base ** i best ones; so a block of n takes about log(n) passes."""
    latest = passes[-1]
    n = min(int(base ** min(len(passes) - 1, 64)), len(latest.places))
    return latest.chosen(latest.surest(n))


def eoser(passes: Sequence[Pass], least: float) -> Chosen:
    """EOSER (arXiv:2509.23924): ascending:2, with the confidence of an end of text scaled from `least` up to 1.

    In a block that began with n masked positions its factor in pass i is least + (1 - least) * (2 ** i - 1) / 2 ** s,
    where s is log2(n) without its fraction.
    """
    latest, i = passes[-1], min(len(passes), 32)
    done = min(1.0, (2**i - 1) / 2 ** int(np.log2(max(2, len(passes[0].places)))))
    factors = np.where(latest.ends, least + (1 - least) * done, 1.0)
    weighed = replace(latest, confidences=latest.confidences * factors)
    return weighed.chosen(weighed.surest(2 ** (i - 1)))


def adaptive(passes: Sequence[Pass], most: float) -> Chosen:
    """Commit the `most` best ones that have 0.8 (after CD4LM, github.com/yihao-liang/CDLM, whose models learn it)."""
    latest = passes[-1]
    return latest.chosen(latest.surest(int(most)) & (latest.confidences >= _CAPPED))


def local_leap(passes: Sequence[Pass], least: float) -> Chosen:
    """LocalLeap (arXiv:2510.07081): commit anchors of 0.9, and at most 4 places from one, what has `least`."""
    latest = passes[-1]
    anchors = latest.confidences >= _ANCHOR
    apart = np.abs(latest.places[:, None] - latest.places[None, anchors])
    is_near = (apart <= _RADIUS).any(1)
    return latest.chosen(anchors | (is_near & (latest.confidences >= least)))


def bounded(passes: Sequence[Pass], least: float) -> Chosen:
    """BACD (arXiv:2602.09555): commit what is as probable as earlier commits on average, between `least` and 0.9.

    In the first pass of a block it is the most confident position's, so an easy block is held to what it has shown.
    """
    latest, committed = passes[-1], list[float]()
    for its, then in itertools.pairwise(passes):
        committed += its.confidences[~np.isin(its.places, then.places)].tolist()
    enough = float(np.mean(committed or latest.confidences.max()))
    return latest.chosen(latest.confidences >= min(max(enough, least), _BOUND))


def parallel(passes: Sequence[Pass], n_stretches: float) -> Chosen:
    """Commit the best position of each stretch (after NAP, arXiv:2602.23225, whose models learn several paths)."""
    latest, n = passes[-1], int(n_stretches)
    stretches, which = latest.places * n // latest.size, np.zeros(len(latest.places), np.bool_)
    for stretch in np.unique(stretches):
        inside = np.flatnonzero(stretches == stretch)
        which[inside[int(latest.confidences[inside].argmax())]] = True
    return latest.chosen(which)


def free_dave(passes: Sequence[Pass], n_ahead: float) -> Chosen:
    """FreeDave (arXiv:2510.00294): the text of schedule:1, with `n_ahead` later states in each forward.

    A state has the most confident tokens of the latest pass, one after another. Where a pass commits what was guessed,
    the rows of the next state are there already. So it pays only where rows cost next to nothing.
    """
    return schedule(passes, 1)


SCHEDULE = RuleKind(schedule, default=1.0, least=1.0, most=256.0)
ASCENDING = RuleKind(ascending, default=2.0, least=1.0, most=256.0)
EOSER = RuleKind(eoser, default=0.01, least=0.0, most=1.0)
ADAPTIVE = RuleKind(adaptive, default=4.0, least=1.0, most=256.0)
LOCAL_LEAP = RuleKind(local_leap, default=0.75, least=0.0, most=1.0)
BOUNDED = RuleKind(bounded, default=0.6, least=0.0, most=_BOUND)
PARALLEL = RuleKind(parallel, default=4.0, least=1.0, most=256.0)
FREE_DAVE = RuleKind(free_dave, default=3.0, least=1.0, most=8.0, looks_ahead=True)
