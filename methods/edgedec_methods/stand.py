"""STAND: n-grams with the target's probabilities, from which children are drawn with the target's noise.

The longest known context of up to three tokens counts, and its children are the top of the perturbed log-probabilities.
Lossless, as it only proposes. It differs from the paper:

- The noise is the target's own at that position (drafter-invariant coupling, Daliri, Musco and Suresh 2024,
  arXiv:2408.07978), not noise made beforehand: so the draw tends to be the target's, and no rejection rule needs q.
- The tree has no template found on a warm-up set: it grows along the paths that are most probable at the moment.
- The average forgets: a new row weighs at least 0.3, which accepted more tokens than the plain average.
- The prompt fills in the contexts that the table lacks.

Paper: Song et al. 2025, arXiv:2506.04708
Option: `--draft stand`
For: sampling many texts of one prompt
Measured: eight texts of one prompt: 1.79 tokens a step, 0.90 in a plain forward's time; `auto` 1.24, 1.04 (`python
    benchmarks/speed/samples.py qwen2.5-coder-1.5b --draft stand --max-tokens 64 --no-memory`)
Status: study
"""

from edgedec.drafter import DraftContext
from edgedec.drafter_traits import Shedding
from edgedec_methods.recycling import NgramDrafter, Ranking

_LEAST_RATE = 0.3


class StandDrafter(NgramDrafter):
    """Implements edgedec.drafter.Drafter with contexts of one to three tokens; samples of a prompt share the table."""

    shedding = Shedding(22, "the table of {name}", keeps_store=True)

    def __init__(self, context: DraftContext) -> None:
        rankings = {
            3: Ranking(context, error=1.0, certain=0.9),
            2: Ranking(context, error=1.5, certain=0.8),
            1: Ranking(context, error=2.0, certain=0.65),
        }
        super().__init__(context, "stand", rankings, _LEAST_RATE)
