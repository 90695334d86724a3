"""Two at a time (after ETE): where no position is sure, the least sure one is committed beside the surest.

Sure positions say little about the others, so passes that commit only these are many. The rule is that of `threshold`
while a position has the given probability. Otherwise it commits the position with the lowest entropy and that with the
highest. ETE also tries several tokens there in one forward, and goes on with one; on a processor each of them would
cost a forward, so here it is the most probable token. It also decodes several blocks at a time; here it is one.

Paper: after ETE, Fu et al. 2025, arXiv:2511.21103
Option: `--method diffusion:explore:0.9`
For: diffusion language models
Measured: 2.69 tokens a forward, 123 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence

from edgedec_methods.diffusion.entropy import entropies
from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind


def explore(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit what is at least as probable as `least`; where nothing is, the lowest and the highest entropy."""
    latest = passes[-1]
    which = latest.confidences >= least
    if not which.any():
        spread = entropies(latest)
        which[[int(spread.argmin()), int(spread.argmax())]] = True
    return latest.chosen(which)


EXPLORE = RuleKind(explore, default=0.9, least=0.0, most=1.0)
