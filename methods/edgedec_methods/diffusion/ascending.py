"""ASS: the passes commit 1, 2, 4, 8, ... positions. So a block of n positions takes about log2(n) passes.

The ascending step size of EOSER and ASS, with another base where a number is given.

Paper: Yang et al. 2025, arXiv:2509.23924
Option: `--method diffusion:ascending:2`
For: diffusion language models, as the extreme with few passes
Measured: 1.49 tokens a forward, 112 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind


def ascending(passes: Sequence[Pass], base: float) -> Chosen:
    """Commit in pass i the base ** i most confident positions."""
    latest = passes[-1]
    n = min(int(base ** min(len(passes) - 1, 64)), len(latest.places))
    return latest.chosen(latest.surest(n))


ASCENDING = RuleKind(ascending, default=2.0, least=1.0, most=256.0)
