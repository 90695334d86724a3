"""AdaBlock-dLLM: a block ends where the model is surest that a line ends, and the next one begins behind it.

The first pass over a block looks at as many positions as are denoised together. If the surest one of those whose token
has the end of a line has the given probability, the block ends with it; without one they are all the block. Inside,
every position with a probability of 0.9 is committed. The paper looks for the end in a quarter of the whole text.

Paper: AdaBlock-dLLM, Lu et al. 2025, arXiv:2509.26432
Option: `--method diffusion:lines:0.3`
For: diffusion language models whose rows see the whole text
Measured: 1.67 tokens a forward, 27 of 60 made tasks with lines right, where `threshold:0.9` has 1.84 and 29 (`python
    benchmarks/diffusion/compare_rules.py lined.gguf --lined --length 16 --context 32 --rules lines:0.3`)
Status: study
"""

from collections.abc import Sequence

import numpy as np

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind
from edgedec_methods.diffusion.threshold import threshold

_SURE = 0.9


def lines(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit the sure positions of a block; `least` says where it ends."""
    return threshold(passes, _SURE)


def line_end(first: Pass, least: float) -> int:
    """Return how many positions a block has that ends with the surest end of a line of at least `least`, or all."""
    is_break = np.array([b"\n" in piece for piece in first.pieces], np.bool_) & (first.confidences >= least)
    best = int(np.where(is_break, first.confidences, -1.0).argmax())
    return int(first.places[best]) + 1 if is_break.any() else first.size


LINES = RuleKind(lines, default=0.3, least=0.0, most=1.0, ends=line_end)
