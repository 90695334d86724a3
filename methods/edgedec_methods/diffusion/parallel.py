"""Stretches (after NAP): each pass commits the most confident position in each of several stretches of the block.

So a block is written at several places at once. The decoding half of NAP (parallel-forced decoding), whose models are
trained on several independent paths of thought beside each other.

Paper: after NAP, Li et al. 2026, arXiv:2602.23225
Option: `--method diffusion:parallel:4`
For: diffusion language models
Measured: 1.31 tokens a forward, 136 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence

import numpy as np

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind


def parallel(passes: Sequence[Pass], n_stretches: float) -> Chosen:
    """Commit one position in each of `n_stretches` stretches, where it has a masked one."""
    latest, n = passes[-1], int(n_stretches)
    stretches, which = latest.places * n // latest.size, np.zeros(len(latest.places), np.bool_)
    for stretch in np.unique(stretches):
        inside = np.flatnonzero(stretches == stretch)
        which[inside[int(latest.confidences[inside].argmax())]] = True
    return latest.chosen(which)


PARALLEL = RuleKind(parallel, default=4.0, least=1.0, most=256.0)
