"""Fast-dLLM: every masked position whose token has at least a given probability is committed, at least the best one.

Paper: Wu et al. 2025, arXiv:2505.22618
Option: `--method diffusion:threshold:0.9`
For: diffusion language models; the default
Measured: 2.13 tokens a forward, 148 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: opt-in
"""

from collections.abc import Sequence

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind


def threshold(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit every position whose token has a probability of at least `least`."""
    return passes[-1].chosen(passes[-1].confidences >= least)


THRESHOLD = RuleKind(threshold, default=0.9, least=0.0, most=1.0)
