"""The score of a number of nodes: expected tokens per second, and the nodes of a draft tree that maximise it.

Nodes are taken in order of path probability, which gives the best tree of every size (DySpec, Xiong et al. 2024,
arXiv:2410.11744).
"""

from collections.abc import Sequence
from itertools import pairwise

from edgedec.cost_curve import Cost, CostCurve
from edgedec.scheduler.draft_tree import DraftTree

_FREE_KEEP = 0.01  # of a plain step: keeping a branch that costs less than this counts as free


class NodeChoice:
    """Chooses the nodes of a draft tree that are worth verifying on one session.

    Args:
        curve: The session's cost curve.
        trees: Whether the session may verify trees; otherwise chains only.
        always: Whether to verify what is proposed, whatever it costs.
    """

    def __init__(self, curve: CostCurve, *, trees: bool, always: bool) -> None:
        self.trees = trees
        self.always = always
        self._curve = curve

    def best(
        self, tree: DraftTree, paths: Sequence[float], cost: Cost, n_max: int, spent_s: float
    ) -> tuple[list[int], float]:
        """Return at most `n_max` nodes to verify, ascending, and the expected tokens per second (0.0 for `always`).

        `paths` holds P(path to the node accepted) of every node, `spent_s` the seconds that drafting took.
        """
        if self.always:
            candidates = range(len(paths)) if self.trees else tree.chain(paths)
            return sorted(sorted(candidates, key=paths.__getitem__, reverse=True)[:n_max]), 0.0
        others = self._curve.others
        if self.trees:
            return best_shape(tree, paths, cost, n_max, spent_s, self._curve.keep_s, others)
        return best_part(paths, tree.chain(paths), cost, n_max, spent_s, others)


def best_part(
    paths: Sequence[float],
    candidates: Sequence[int],
    cost: Cost,
    n_max: int,
    spent_s: float,
    others: float = 0.0,
) -> tuple[list[int], float]:
    """Return the nodes worth verifying and the expected tokens per second with them; no nodes where plain is faster.

    Args:
        paths: P(path to the node accepted) of every node.
        candidates: Nodes to choose from, ascending.
        cost: Seconds of a forward by the number of nodes in it; 0 nodes are the plain step.
        n_max: Most nodes.
        spent_s: Seconds that drafting took; they are paid whatever is chosen, the plain step included.
        others: Tokens that other requests gain by the same forward; the rate is that of all requests together.
    """
    order = sorted(candidates, key=paths.__getitem__, reverse=True)[:n_max]
    expected = 1.0 + others
    best_n, best_rate = 0, expected / (cost(0) + spent_s)
    for n, node in enumerate(order, start=1):
        expected += paths[node]
        rate = expected / (cost(n) + spent_s)
        if rate > best_rate:
            best_n, best_rate = n, rate
    return sorted(order[:best_n]), best_rate


def best_shape(
    tree: DraftTree,
    paths: Sequence[float],
    cost: Cost,
    n_max: int,
    spent_s: float,
    keep_s: float,
    others: float = 0.0,
) -> tuple[list[int], float]:
    """Return the best part of a tree, or of its likeliest chain where keeping a branch costs more than it brings.

    `keep_s` is the seconds that keeping one branch of a tree takes after the forward; a chain needs none. The other
    parameters and the result are best_part's.
    """
    nodes, rate = best_part(paths, range(len(paths)), cost, n_max, spent_s, others)
    if keep_s < _FREE_KEEP * cost(0) or all(tree.parents[node] == last for last, node in pairwise([-1, *nodes])):
        return nodes, rate
    whole = best_part(paths, range(len(paths)), lambda n: cost(n) + (keep_s if n else 0.0), n_max, spent_s, others)
    chain = best_part(paths, tree.chain(paths), cost, n_max, spent_s, others)
    return whole if whole[1] > chain[1] else chain
