"""AdaBlock: a part of a block that ends a line is finished before the rest of it is begun.

A part ends at the most confident one of the masked positions whose token has the end of a line, if that token has the
given probability; without one, the part is all that is left. Inside, every position with a probability of 0.9 is
committed. The paper makes a block of each part, which needs a model that was trained without blocks; here parts are of
one block, so that all models have them.

Paper: AdaBlock-dLLM, github.com/lgxi24/AdaBlock-dLLM
Option: `--method diffusion:ada_block:0.3`
For: diffusion language models
Measured: 2.13 tokens a forward, 148 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_SURE = 0.9


def ada_block(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit the sure positions of a part, which ends at an end of a line with at least the probability `least`."""
    latest, end = passes[-1], 0
    for its in passes:
        if its.places[0] >= end:
            is_break = np.array([b"\n" in piece for piece in its.pieces], np.bool_) & (its.confidences >= least)
            best = int(np.where(is_break, its.confidences, -1.0).argmax())
            end = int(its.places[best]) + 1 if is_break.any() else latest.size
    confidences = np.where(latest.places < end, latest.confidences, -1.0)
    return replace(latest, confidences=confidences).chosen(confidences >= _SURE)


ADA_BLOCK = RuleKind(ada_block, default=0.3, least=0.0, most=1.0)
