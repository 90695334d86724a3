"""BACD: the probability that is enough is the mean of those committed so far, between the given one and 0.9.

In the first pass of a block it is that of the most confident position, between the same bounds. So a block that is easy
is held to what it has shown, and one that is hard goes on. The phases of TCCF, with large blocks for thoughts and small
ones for the answer, need a model that was trained with several sizes of blocks.

Paper: Advancing Block Diffusion Language Models for Test-Time Scaling, arXiv:2602.09555
Option: `--method diffusion:bounded:0.6`
For: diffusion language models
Measured: 2.14 tokens a forward, 146 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

import itertools
from collections.abc import Sequence

import numpy as np

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_MOST = 0.9


def bounded(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit what is as probable as earlier commits on average; the average is held between `least` and 0.9."""
    latest, committed = passes[-1], list[float]()
    for its, then in itertools.pairwise(passes):
        committed += its.confidences[~np.isin(its.places, then.places)].tolist()
    enough = float(np.mean(committed or latest.confidences.max()))
    return latest.chosen(latest.confidences >= min(max(enough, least), _MOST))


BOUNDED = RuleKind(bounded, default=0.6, least=0.0, most=_MOST)
