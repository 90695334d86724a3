"""Several drafters' proposals as one tree, and the part of it that pays.

Fusing by longest prefix is RASD's (Quan et al. 2025, arXiv:2503.03434); nodes are taken in order of path probability,
which is the best tree of every size (DySpec, Xiong et al. 2024, arXiv:2410.11744).
"""

from collections.abc import Callable, Sequence
from itertools import pairwise

from edgedec.draft import Draft

_NO_KEEP = 0.01  # of a plain step: below that, keeping a branch costs nothing


class DraftTree:
    """Nodes by (parent, token); parents stand before their children.

    Attributes:
        tokens: Token of each node.
        parents: Index of its parent, -1 for the last accepted token.
        p: P(node accepted | parent accepted), the largest that a drafter gave.
    """

    __slots__ = ("_index", "_sums", "p", "parents", "tokens")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.p: list[float] = []
        self._index: dict[tuple[int, int], int] = {}
        self._sums: dict[int, float] = {}

    def add(self, tokens: Sequence[int], parents: Sequence[int], p: Sequence[float]) -> list[int]:
        """Merge a draft in, with corrected p; return the places of its nodes."""
        places: list[int] = []
        for token, parent, chance in zip(tokens, parents, p, strict=True):
            above = places[parent] if parent >= 0 else -1
            place = self._index.get((above, token))
            if place is None:
                place = len(self.tokens)
                self._index[above, token] = place
                self.tokens.append(token)
                self.parents.append(above)
                self.p.append(chance)
                self._sums[above] = self._sums.get(above, 0.0) + chance
            elif chance > self.p[place]:
                self._sums[above] += chance - self.p[place]
                self.p[place] = chance
            places.append(place)
        return places

    def paths(self) -> list[float]:
        """Return P(path to the node accepted) of each node; siblings that sum to over 1 are scaled down."""
        result: list[float] = []
        for parent, chance in zip(self.parents, self.p, strict=True):
            total = self._sums[parent]
            above = result[parent] if parent >= 0 else 1.0
            result.append(above * (chance / total if total > 1 else chance))
        return result

    def draft(self, nodes: Sequence[int]) -> Draft:
        """Return these nodes, ascending and closed under parents, as a draft; without q, as they were chosen."""
        places = {node: i for i, node in enumerate(nodes)}
        places[-1] = -1
        return Draft.tree(
            [self.tokens[node] for node in nodes],
            [places[self.parents[node]] for node in nodes],
            [self.p[node] for node in nodes],
        )

    def chain(self, paths: Sequence[float]) -> list[int]:
        """Return the nodes of the most probable chain, for a runtime that takes no trees."""
        result: list[int] = []
        last = -1
        for node, parent in enumerate(self.parents):
            if parent == last and not any(
                self.parents[other] == last and paths[other] > paths[node] for other in range(node + 1, len(paths))
            ):
                result.append(node)
                last = node
        return result


def best_part(
    paths: Sequence[float],
    candidates: Sequence[int],
    cost: Callable[[int], float],
    n_max: int,
    spent_s: float,
    others: float = 0.0,
) -> tuple[list[int], float]:
    """Return the nodes worth verifying and the expected tokens per second with them; none where plain is faster.

    Args:
        paths: P(path accepted) of every node.
        candidates: Nodes to choose from.
        cost: Seconds of a forward by the number of nodes in it (0: the plain step).
        n_max: Most nodes.
        spent_s: What drafting took; it is paid for whatever is chosen, the plain step included.
        others: Tokens that others gain by the same forward: the rate is that of all together.
    """
    order = sorted(candidates, key=lambda node: (-paths[node], node))[:n_max]
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
    cost: Callable[[int], float],
    n_max: int,
    spent_s: float,
    keep_s: float,
    others: float = 0.0,
) -> tuple[list[int], float]:
    """Return the best part of a tree or, where keeping a branch costs more than that brings, of its likeliest chain.

    `keep_s` is what keeping one takes after the forward, in seconds; a chain needs none. The rest as for best_part.
    """
    nodes, rate = best_part(paths, range(len(paths)), cost, n_max, spent_s, others)
    in_order = all(tree.parents[node] == last for last, node in pairwise([-1, *nodes]))
    if in_order or keep_s < _NO_KEEP * cost(0):
        return nodes, rate
    whole = best_part(paths, range(len(paths)), lambda n: cost(n) + (keep_s if n else 0.0), n_max, spent_s, others)
    chain = best_part(paths, tree.chain(paths), cost, n_max, spent_s, others)
    return whole if whole[1] > chain[1] else chain
