"""Self-editing (after AutoEdit): committed tokens are looked at again, and changed or masked once more.

Masked positions are committed as by `threshold:0.9`. A committed position gets another token where its row gives that
one at least the given probability, unless it has stood there before. It is masked again, once, where its row gives its
token less than 0.05 and the best one less than the given probability.

Paper: after ReflectDrive-2 (AutoEdit), and Remasking Discrete Diffusion Models, arXiv:2503.00307
Option: `--method diffusion:edit:0.9`
For: diffusion language models
Measured: 0 of 60 made tasks with lines right, `threshold:0.9` 29, by a model that learned masked rows alone (`python
    benchmarks/diffusion/compare_rules.py lined.gguf --lined --length 16 --context 32 --rules edit:0.9`)
Status: study
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from edgedec_methods.diffusion.rules import MASKED, Chosen, Pass, RuleKind

_SURE, _DOUBTED = 0.9, 0.05


def edit(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit sure positions; change a committed one where the model is sure of another token, mask one it doubts."""
    latest = passes[-1]
    assert latest.committed is not None, "a rule that revises is given what is committed"
    open_ones, chosen = latest.committed == MASKED, dict[int, int]()
    if open_ones.any():
        sure = open_ones & (latest.confidences >= _SURE)
        if not sure.any():
            sure[int(np.where(open_ones, latest.confidences, -1.0).argmax())] = True
        chosen = latest.chosen(sure)
    for i in np.flatnonzero(~open_ones & (latest.tokens != latest.committed)):
        place, token, stands = int(latest.places[i]), int(latest.tokens[i]), int(latest.committed[i])
        stood = [stood for its in passes for stood in _at(its, place)]
        weights = np.exp(latest.logits[i].astype(np.float64) - latest.logits[i].max())
        if latest.confidences[i] >= least:
            if token not in stood:
                chosen[place] = token
        elif weights[stands] < _DOUBTED * weights.sum() and not any(
            then == MASKED != before for before, then in pairwise(stood)
        ):
            chosen[place] = MASKED
    return chosen


def _at(its: Pass, place: int) -> list[int]:
    """Return what stood at a position, if the pass looked at it."""
    return [] if its.committed is None else its.committed[its.places == place].tolist()


EDIT = RuleKind(edit, default=0.9, least=0.0, most=1.0, revises=True)
