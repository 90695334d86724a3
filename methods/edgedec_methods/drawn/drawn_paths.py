"""Independent paths: a drafter draws K chains side by side, for rules that choose among independent draws.

Equal beginnings are evaluated once, and stay nodes of their own.

Paper: SpecTr, Sun et al. 2023, arXiv:2310.15141
Option: `--draft-option tree=paths:K`, with `--draft-option rule=kseq` or `--draft-option rule=multipath`
For: comparing shapes of drawn trees
Measured: 54.6 tokens/s at best with a head at temperature 1, where `coupled` has 61.5 with its trees
    (`studies/drawn_trees`, program at 67b59fb8)
Status: study
"""

from edgedec_methods.drawn.drawn_trees import DrawnLevel, DrawnShape, TreePlace, agreement


def _add(level: DrawnLevel) -> list[TreePlace]:
    """Add the next token of each path, a draw of its own; behind the text, the one place there begins all paths."""
    laws = list(level.laws) * (level.widths[0] if level.depth == 0 else 1)
    children: list[TreePlace] = []
    n_tried: dict[tuple[int, ...], int] = {}
    for place, law in laws[: level.nodes.n_left]:
        token, _ = next(level.drawn(law, place))
        p, nth = agreement(law), n_tried.get(place.tokens, 0)
        n_tried[place.tokens] = nth + 1
        node = level.nodes.add(token, place.node, p * (1 - p) ** nth, law)
        children.append(place.behind(node, token, p))
    return children


PATHS = DrawnShape(_add, siblings="independent", n_widths=1)
