"""Stochastic beam: a drafter draws the K paths with the largest keys on each level, without replacement.

The shape is RSD-S of its paper, by stochastic beam search (Kool et al. 2019, arXiv:1903.06059).

Paper: Jeon et al. 2024, arXiv:2402.14160
Option: `--draft-option tree=beam:K`, with `--draft-option rule=recursive`
For: comparing shapes of drawn trees
Measured: 54.0 tokens/s with a head at temperature 1, where `coupled` has 61.5 with its trees, and `grow` 60.5
    (`studies/drawn_trees`, program at 67b59fb8)
Status: study
"""

from collections.abc import Iterator
from heapq import merge
from itertools import islice
from math import log

from edgedec_methods.drawn.drawn_trees import DrawnLevel, DrawnShape, TreePlace, agreement, mass_of


def _add(level: DrawnLevel) -> list[TreePlace]:
    """Add the children with the largest keys, of all places together."""

    def keyed(family: int) -> Iterator[tuple[float, int, int]]:
        place, law = level.laws[family]
        for token, key in level.drawn(law, place):
            yield -key, family, token

    children, n_tried = [], [0] * len(level.laws)
    width = min(level.widths[0], level.nodes.n_left)
    for negative, family, token in islice(merge(*map(keyed, range(len(level.laws)))), width):
        place, law = level.laws[family]
        p = agreement(law)
        chance = p * (1 - p) ** n_tried[family]
        n_tried[family] += 1
        node = level.nodes.add(token, place.node, chance, law)
        children.append(place.behind(node, token, chance, log(mass_of(law, token)), -negative))
    return children


BEAM = DrawnShape(_add, siblings="without replacement", n_widths=1)
