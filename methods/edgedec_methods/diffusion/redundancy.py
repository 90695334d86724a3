"""R2-dLLM: what neighbours and earlier passes say again counts, beside a probability of 0.9.

Committed are also: all masked ones of three neighbours of which at most one is committed, where their mean probability
is the given one; of two or more neighbours with the same token, of which one has that probability, the most confident
one alone; and a position that had the same token in three passes, and has that probability in the last.

Paper: Du et al. 2026, arXiv:2604.18995
Option: `--method diffusion:redundancy:0.8`
For: diffusion language models
Measured: 1.98 tokens a forward, 142 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_SURE, _WINDOW, _SAME = 0.9, 3, 3


def redundancy(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit sure positions, and with the probability `least` what is said again."""
    latest = passes[-1]
    at = {place: i for i, place in enumerate(latest.places.tolist())}
    chosen: NDArray[np.bool_] = latest.confidences >= _SURE
    for start in range(latest.size - _WINDOW + 1):
        inside = [at[place] for place in range(start, start + _WINDOW) if place in at]
        if len(inside) >= _WINDOW - 1 and latest.confidences[inside].mean() >= least:
            chosen[inside] = True
    for run in _runs(latest):
        best = run[int(latest.confidences[run].argmax())]
        if latest.confidences[best] > least:
            chosen[run] = False
            chosen[best] = True
    return latest.chosen(chosen | (_lasting(passes) & (latest.confidences >= least)))


def _runs(latest: Pass) -> list[list[int]]:
    """Return the groups of two or more neighbours, as numbers of masked positions, that would get the same token."""
    groups: list[list[int]] = []
    for i, (place, token) in enumerate(zip(latest.places.tolist(), latest.tokens.tolist(), strict=True)):
        is_next = i > 0 and latest.places[i - 1] == place - 1 and latest.tokens[i - 1] == token
        groups[-1:] = [[*groups[-1], i]] if is_next else [*groups[-1:], [i]]
    return [group for group in groups if len(group) > 1]


def _lasting(passes: Sequence[Pass]) -> NDArray[np.bool_]:
    """Return which masked positions had the same token in the last passes."""
    latest, before = passes[-1], [dict(zip(its.places.tolist(), its.tokens.tolist(), strict=True)) for its in passes]
    same = zip(latest.places.tolist(), latest.tokens.tolist(), strict=True)
    return np.array([[its.get(p) for its in before[-_SAME:]] == [token] * _SAME for p, token in same], np.bool_)


REDUNDANCY = RuleKind(redundancy, default=0.8, least=0.0, most=1.0)
