"""Siblings without replacement: a drafter draws K children of the text, L of each of them, and so on, then one each.

The shape is RSD-C of its paper.

Paper: Jeon et al. 2024, arXiv:2402.14160
Option: `--draft-option tree=siblings:K-L`, with `--draft-option rule=recursive`
For: comparing shapes of drawn trees
Measured: 51.5 tokens/s with a head at temperature 1, where `coupled` has 61.5 with its trees, and `grow` 60.5
    (`studies/drawn_trees`, program at 67b59fb8)
Status: study
"""

from itertools import islice

from edgedec_methods.drawn.drawn_trees import DrawnLevel, DrawnShape, TreePlace, agreement

_MOST_LEVELS = 64  # that branch


def _add(level: DrawnLevel) -> list[TreePlace]:
    """Add as many children to each place: the number of the level or, below the last one, a single child."""
    width = level.widths[level.depth] if level.depth < len(level.widths) else 1
    children = []
    for place, law in level.laws:
        p = agreement(law)
        for nth, (token, _) in enumerate(islice(level.drawn(law, place), min(width, level.nodes.n_left))):
            chance = p * (1 - p) ** nth
            children.append(place.behind(level.nodes.add(token, place.node, chance, law), token, chance))
    return children


SIBLINGS = DrawnShape(_add, siblings="without replacement", n_widths=_MOST_LEVELS)
