"""Entropy threshold (after dParallel): what is below a given entropy is committed, at least the lowest position.

The decoding half of dParallel, whose models are trained to be certain early. The entropy is in nats.

Paper: after dParallel, Chen et al. 2025, arXiv:2509.26488
Option: `--method diffusion:entropy:0.5`
For: diffusion language models
Measured: 2.26 tokens a forward, 146 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind


def entropies(its: Pass) -> NDArray[np.float64]:
    """Return the entropy in nats of each row of a pass."""
    scores = its.logits.astype(np.float64) - its.logits.max(1, keepdims=True)
    weights = np.exp(scores)
    total = weights.sum(1)
    nats: NDArray[np.float64] = np.log(total) - (weights * scores).sum(1) / total
    return nats


def entropy(passes: Sequence[Pass], most: float) -> Chosen:
    """Commit every position whose entropy is below `most`."""
    spread = entropies(passes[-1])
    return replace(passes[-1], confidences=-spread).chosen(spread < most)


ENTROPY = RuleKind(entropy, default=0.5, least=0.0, most=100.0)
