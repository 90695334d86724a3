"""LocalLeap: near a position whose token has a probability of 0.9, a lower one is enough for the others.

The positions that are committed are the anchors, with 0.9 or more, and those at most 4 places from an anchor that have
at least the given probability.

Paper: Kong et al. 2025, arXiv:2510.07081
Option: `--method diffusion:local_leap:0.75`
For: diffusion language models
Measured: 2.52 tokens a forward, 148 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence

import numpy as np

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_ANCHOR, _RADIUS = 0.9, 4


def local_leap(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit anchors, and near them every position with at least the probability `least`."""
    latest = passes[-1]
    anchors = latest.confidences >= _ANCHOR
    apart = np.abs(latest.places[:, None] - latest.places[None, anchors])
    is_near = (apart <= _RADIUS).any(1)
    return latest.chosen(anchors | (is_near & (latest.confidences >= least)))


LOCAL_LEAP = RuleKind(local_leap, default=0.75, least=0.0, most=1.0)
