"""CCD: the most confident positions are committed together where the pass before was sure of the same tokens there.

Looked at are the given number of most confident positions of a pass. Where the most confident one was among those that
the pass before was most confident of and left, all that were, and had the same token then, are committed; else it alone
is. This is the form with an adaptive budget, over two passes, as released; the paper also averages over more of them.

Paper: Chen et al. 2025, arXiv:2512.02044
Option: `--denoise coherent:4`
For: diffusion language models
Measured: 1.61 tokens a forward, 123 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from edgedec_methods.diffusion.rules import Pass, Rule, RuleKind


def coherent(n: float) -> Rule:
    """Return the rule that looks at the `n` most confident positions of a pass."""

    def rule(passes: Sequence[Pass]) -> Mapping[int, int]:
        latest, none = passes[-1], np.zeros(len(passes[-1].places), np.bool_)
        if len(passes) == 1:
            return latest.chosen(none)
        left = np.isin(passes[-2].places, latest.places)
        its = passes[-2]
        before = replace(its, places=its.places[left], tokens=its.tokens[left], confidences=its.confidences[left])
        again = latest.surest(int(n)) & before.surest(int(n))
        same = again & (latest.tokens == before.tokens)
        return latest.chosen(same if (again & latest.surest(1)).any() else none)

    return rule


COHERENT = RuleKind(coherent, default=4.0, least=1.0, most=128.0)
