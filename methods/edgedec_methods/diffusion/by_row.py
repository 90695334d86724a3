"""EB-Sampler, Prophet (and after dParallel, WeDLM, ETE): rules that read how far a row is spread over its tokens.

Entropies are in nats. A number behind a rule's name is the second argument of its function.

Paper: beside each rule
Option: `--method diffusion:entropy:0.5`, `entropy_bound:0.5`, `near_first:0.4`, `explore:0.9`, `prophet:7.5`
For: diffusion language models
Measured: tokens a forward and right ones of 176 made tasks, where `threshold:0.9` has 2.13 and 148: entropy 2.26, 146;
    entropy_bound 2.68, 138; near_first 2.10, 146; explore 2.69, 123; prophet 3.23, 118 (`python
    benchmarks/diffusion/compare_rules.py small.gguf --tasks 16`)
Status: study
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from edgedec_methods.diffusion.rules import Chosen, Pass, RuleKind

_BY_PLACE = 0.02


def entropies(its: Pass) -> NDArray[np.float64]:
    """Return the entropy in nats of each row of a pass."""
    scores = its.logits.astype(np.float64) - its.logits.max(1, keepdims=True)
    weights = np.exp(scores)
    total = weights.sum(1)
    nats: NDArray[np.float64] = np.log(total) - (weights * scores).sum(1) / total
    return nats


def entropy(passes: Sequence[Pass], most: float) -> Chosen:
    """Commit what is below `most` nats (after dParallel, arXiv:2509.26488, whose models are trained to be certain)."""
    spread = entropies(passes[-1])
    return replace(passes[-1], confidences=-spread).chosen(spread < most)


def entropy_bound(passes: Sequence[Pass], most: float) -> Chosen:
    """EB-Sampler (arXiv:2505.24857): commit the surest ones whose entropies, without the last, sum to at most `most`.

    So positions that depend on each other are not committed together unless the model is sure of them.
    """
    spread = entropies(passes[-1])
    order = np.argsort(spread, kind="stable")
    sums = np.cumsum(spread[order])
    which = np.zeros(len(order), np.bool_)
    which[order[sums - spread[order] <= most]] = True
    return replace(passes[-1], confidences=-spread).chosen(which)


def near_first(passes: Sequence[Pass], most: float) -> Chosen:
    """Commit what is below `most` nats, where each place behind the first adds 0.02 (after WeDLM, arXiv:2512.22737)."""
    latest = passes[-1]
    spread = entropies(latest) + _BY_PLACE * (latest.places - latest.places[0])
    return replace(latest, confidences=-spread).chosen(spread < most)


def explore(passes: Sequence[Pass], least: float) -> Chosen:
    """Commit what has `least`; else the lowest and the highest entropy (after ETE, arXiv:2511.21103).

    Sure positions say little about the others. ETE also tries several tokens there, and goes on across blocks.
    """
    latest = passes[-1]
    which = latest.confidences >= least
    if not which.any():
        spread = entropies(latest)
        which[[int(spread.argmin()), int(spread.argmax())]] = True
    return latest.chosen(which)


def prophet(passes: Sequence[Pass], enough: float) -> Chosen:
    """Prophet (arXiv:2508.19982): commit everything once the two best logits are `enough` apart on average.

    Until then each pass commits one position. From a third of the block on two thirds are enough, from two thirds on a
    third. The paper looks at the positions of the answer, which its evaluation pins; here they are the block's.
    """
    latest = passes[-1]
    best = np.partition(latest.logits, -2)[:, -2:].astype(np.float64)
    done = 1 - len(latest.places) / latest.size
    third = 3 if done < 1 / 3 else 2 if done < 2 / 3 else 1
    is_sure = float((best[:, 1] - best[:, 0]).mean()) >= enough * third / 3
    return latest.chosen(np.full(len(latest.places), is_sure))


ENTROPY = RuleKind(entropy, default=0.5, least=0.0, most=100.0)
ENTROPY_BOUND = RuleKind(entropy_bound, default=0.5, least=0.0, most=1000.0)
NEAR_FIRST = RuleKind(near_first, default=0.4, least=0.0, most=100.0)
EXPLORE = RuleKind(explore, default=0.9, least=0.0, most=1.0)
PROPHET = RuleKind(prophet, default=7.5, least=0.0, most=1000.0)
