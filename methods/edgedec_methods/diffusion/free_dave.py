"""FreeDave: later states of a block are guessed and evaluated beside the current one, with the text of `schedule:1`.

The states are those in which the most confident tokens of the latest pass are committed, one after another. Where a
pass commits what was guessed, the rows of the next state are there already, so fewer forwards give the same text. Each
forward has the rows of all of these states, so it pays only where rows cost next to nothing.

Paper: Wu and Zhang 2025, arXiv:2510.00294
Option: `--method diffusion:free_dave:3`
For: diffusion language models, without a change of the text
Measured: 1.08 tokens a forward, 149 of 176 made tasks right, where `schedule:1` has 0.75 and 149
    (`python benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind
from edgedec_methods.diffusion.schedule import schedule


def free_dave(passes: Sequence[Pass], n_ahead: float) -> Chosen:
    """Commit the most confident position; the session evaluates `n_ahead` states ahead."""
    return schedule(passes, 1)


FREE_DAVE = RuleKind(free_dave, default=3.0, least=1.0, most=8.0, looks_ahead=True)
