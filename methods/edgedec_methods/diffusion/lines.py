"""Lines first (after AdaBlock): a part of a block that ends a line is finished before the rest of it is begun.

A part ends at the most confident one of the masked positions whose token has the end of a line, if that token has the
given probability; without one, the part is all that is left. Inside, every position with a probability of 0.9 is
committed. AdaBlock makes a block of each part, and the next one begins behind it; here parts are of one block.

Paper: after AdaBlock-dLLM, github.com/lgxi24/AdaBlock-dLLM
Option: `--method diffusion:lines:0.3`
For: diffusion language models
Measured: nothing yet: without a line end in an answer, as in the made tasks, it is `threshold`
Status: study
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_SURE = 0.9


def lines(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit the sure positions of a part, which ends at an end of a line with at least the probability `least`."""
    latest, end = passes[-1], 0
    for its in passes:
        if its.places[0] >= end:
            is_break = np.array([b"\n" in piece for piece in its.pieces], np.bool_) & (its.confidences >= least)
            best = int(np.where(is_break, its.confidences, -1.0).argmax())
            end = int(its.places[best]) + 1 if is_break.any() else latest.size
    confidences = np.where(latest.places < end, latest.confidences, -1.0)
    return replace(latest, confidences=confidences).chosen(confidences >= _SURE)


LINES = RuleKind(lines, default=0.3, least=0.0, most=1.0)
