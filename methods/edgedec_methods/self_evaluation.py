"""Pruning midway: texts are scored halfway, and unpromising ones are dropped.

The paper trains a token that says whether a restart would be better. Here any scorer stands in its place: a probe, or
the model that is asked (RESTART).

Paper: after Adaptive Inference-Time Compute, Manvi et al. 2024, arXiv:2410.02725
Option: Python only, `pruned`
For: several texts whose end is dear
Measured: 25 of 40 word problems right for 110 plain steps, the likeliest of 4 has 35, p = 0.006; the judgement after 24
    tokens has an AUROC of 0.50 (`answers/better_answers`, program at 353e632c)
Status: study
"""

from collections.abc import Sequence

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.choosing.scorer import TextScorer
from edgedec.errors import OptionError
from edgedec.sampling import SamplingParams
from edgedec_methods.sampled_steps import write_steps

RESTART = (
    "That answer is not finished. Is it going well, or would it be better to start again? "
    "Reply with one letter: A if it is going well, B to start again."
)


def pruned(
    texts: PartialTexts,
    live: Sequence[PartialText],
    params: SamplingParams,
    seeds: Sequence[int],
    scorer: TextScorer,
    *,
    at: int,
    keep: int,
) -> tuple[list[PartialText], list[float]]:
    """Return whole texts, and the scores by which those were kept; the others were dropped after `at` tokens.

    Args:
        texts: Who holds them.
        live: The texts; they are used up.
        params: How tokens are drawn.
        seeds: By text, its seed; a text that is kept is the one that its seed writes alone.
        scorer: Scores the texts after `at` tokens.
        at: After how many tokens.
        keep: How many texts to keep, those with the highest scores; of equals the first.

    Raises:
        OptionError: A number is below 1, or there are fewer texts than are to be kept.
    """
    if at < 1 or not 1 <= keep <= len(live):
        raise OptionError("keep", keep, f"it must be from 1 to {len(live)}, and judged after 1 token or more")
    begun = write_steps(texts, live, params, seeds, separator=None, most=at)
    scores = scorer(texts, begun)
    order = sorted(range(len(begun)), key=lambda i: -scores[i])[:keep]
    remaining = sorted(order)
    texts.drop(*(text for i, text in enumerate(begun) if i not in remaining))
    written = write_steps(texts, [begun[i] for i in remaining], params, [seeds[i] for i in remaining], separator=None)
    return written, [scores[i] for i in remaining]
