"""The score of a number of nodes: expected tokens per second, and the nodes of a draft tree that maximise it.

Nodes are taken in order of path probability, which gives the best tree of every size (DySpec, Xiong et al. 2024,
arXiv:2410.11744).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from edgedec.cost_curve import Cost, CostCurve
from edgedec.draft_constants import NEXT_TO_NOTHING
from edgedec.scheduler.draft_tree import DraftTree


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How a generation drafts.

    Attributes:
        n_max: Most nodes of a draft.
        greedy: Whether tokens are drawn at temperature 0.
        always: Whether to verify what is proposed, whatever it costs.
        coupled: Whether the verification rule is the coupled one, which ignores q.
        trees: Whether trees may be verified; otherwise chains only.
    """

    n_max: int
    greedy: bool = True
    always: bool = False
    coupled: bool = True
    trees: bool = True


def choose_nodes(
    tree: DraftTree,
    paths: Sequence[float],
    cost: Cost,
    n_max: int,
    spent_s: float,
    curve: CostCurve,
    options: PolicyOptions,
) -> tuple[list[int], float]:
    """Return at most `n_max` nodes to verify, ascending, and the expected tokens per second (0.0 for options.always).

    Args:
        tree: The proposals.
        paths: P(path to the node accepted) of every node.
        cost: Seconds of a forward by the number of nodes in it; 0 nodes are the plain step.
        n_max: Most nodes.
        spent_s: Seconds that drafting took.
        curve: The session's cost curve, which knows what keeping a branch costs and what others gain.
        options: How to draft.
    """
    if options.always:
        candidates = range(len(paths)) if options.trees else tree.chain(paths)
        candidates = [node for node in candidates if paths[node] > 0]  # others were ruled out
        return sorted(sorted(candidates, key=paths.__getitem__, reverse=True)[:n_max]), 0.0
    keep_s, others = curve.keep_s, curve.others
    if not options.trees:
        return best_part(paths, tree.chain(paths), cost, n_max, spent_s, others)
    nodes, rate = best_part(paths, range(len(paths)), cost, n_max, spent_s, others)
    is_free = not nodes or keep_s < NEXT_TO_NOTHING * cost(0)
    if is_free or all(tree.parents[node] == last for last, node in pairwise([-1, *nodes])):
        return nodes, rate
    # Keeping a branch costs something: the best part of a tree that pays for it, or of the likeliest chain.
    whole = best_part(paths, range(len(paths)), lambda n: cost(n) + (keep_s if n else 0.0), n_max, spent_s, others)
    chain = best_part(paths, tree.chain(paths), cost, n_max, spent_s, others)
    return whole if whole[1] > chain[1] else chain


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
    expected = 1.0 + others
    best_n, best_rate = 0, expected / (cost(0) + spent_s)
    order = sorted(candidates, key=paths.__getitem__, reverse=True)[:n_max]
    for n, node in enumerate(order, start=1):
        expected += paths[node]
        rate = expected / (cost(n) + spent_s)
        if rate > best_rate:
            best_n, best_rate = n, rate
    return sorted(order[:best_n]), best_rate
