"""Scores a drafter's proposals against the text that came, and corrects the drafter's p_accept by these scores."""

from bisect import bisect_right
from collections.abc import Sequence

from edgedec.draft import Draft
from edgedec.draft_constants import MEMORY, PRIOR
from edgedec.drafter import Correction

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.96)  # of the bins of p_accept


class Calibration(Correction):
    """P(node accepted | parent accepted) from the drafter's own estimate.

    A bin of estimates keeps the sum of the estimates and the sum of the acceptances; an estimate is scaled by their
    ratio, so the order within a bin stays.

    >>> calibration = Calibration()
    >>> for _ in range(94):
    ...     calibration.observe(0.5, False)
    >>> round(calibration.corrected(0.5), 3)
    0.03
    """

    __slots__ = ("_accepted", "_estimated")

    def __init__(self) -> None:
        super().__init__(_EDGES)
        self._estimated = [0.0] * len(self.factors)
        self._accepted = [0.0] * len(self.factors)

    def observe(self, p: float, accepted: bool) -> None:
        """Take a node with the estimate p whose parent was accepted, and whether the node was right itself."""
        i = bisect_right(_EDGES, p)
        estimated, hits = self._estimated[i] + p, self._accepted[i] + accepted
        if estimated > MEMORY * max(p, 0.05):
            estimated, hits = estimated / 2, hits / 2
        self._estimated[i], self._accepted[i] = estimated, hits
        prior = PRIOR * max(p, 0.01)
        self.factors[i] = (hits + prior) / (estimated + prior)


def score(draft: Draft, token_ids: Sequence[int], calibration: Calibration) -> tuple[list[int], int, int]:
    """Compare a draft with the tokens that came, verified or not, and let its drafter's calibration observe them.

    Returns the nodes that are the text, root first; the number of nodes whose parents are the text; and how many tokens
    deep the deepest of these is.
    """
    depths = {-1: 0}
    last, seen, is_drawn = -1, set(), draft.q is not None
    n_tried = deepest = 0
    nodes = zip(draft.tokens, draft.parents, draft.p_accept, strict=True)
    for node, (token, parent, p) in enumerate(nodes):
        depth = depths.get(parent)
        if depth is None or depth >= len(token_ids):
            continue
        right = token == token_ids[depth]
        if (depth, token) not in seen:  # paths side by side may hold a token twice, which is one chance
            seen.add((depth, token))
            calibration.observe(p, right)
            n_tried += 1
        deepest = max(deepest, depth + 1)
        if right and (depth == depths[last] or is_drawn):  # of two siblings with the same token the first
            depths[node] = depth + 1
            last = node if depth == depths[last] else last
    path: list[int] = []
    while last >= 0:
        path.insert(0, last)
        last = draft.parents[last]
    return path, n_tried, deepest
