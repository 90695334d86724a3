"""The proposals of several drafters as one tree.

They are merged by longest prefix (RASD, Quan et al. 2025, arXiv:2503.03434).
"""

from collections.abc import Callable, Iterable, Sequence

from edgedec.draft import Draft


class DraftTree:
    """The nodes that drafters propose before one step, one for each (parent, token); parents stand before children.

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
        """Merge a draft into the tree and return the index in the tree of each of its nodes.

        `parents` are indices in the draft (-1: the last accepted token), `p` its corrected p_accept.
        """
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

    def drop_roots(self, is_wrong: Callable[[int], bool]) -> None:
        """Give the first tokens that `is_wrong` names the probability 0, and so all nodes behind them."""
        for node, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent < 0 and is_wrong(token):
                self._sums[-1] -= self.p[node]
                self.p[node] = 0.0

    def paths(self) -> list[float]:
        """Return P(path to the node accepted) of each node; siblings whose p sum to over 1 are scaled down to 1."""
        result: list[float] = []
        for parent, chance in zip(self.parents, self.p, strict=True):
            total = self._sums[parent]
            above = result[parent] if parent >= 0 else 1.0
            result.append(above * (chance / total if total > 1 else chance))
        return result

    def draft(self, nodes: Sequence[int]) -> Draft:
        """Return some nodes, ascending and with all of their parents, as a draft: the likeliest chain, then the others.

        Where that chain is accepted, its rows follow one another, and a session has nothing to move to keep them. The
        draft has no q: its nodes were chosen, so they no longer follow the distribution they were drawn from.
        """
        places = {node: place for place, node in enumerate(dict.fromkeys([*self._chain_of(nodes, self.p), *nodes]))}
        return Draft.tree(
            [self.tokens[node] for node in places],
            [places.get(self.parents[node], -1) for node in places],
            [self.p[node] for node in places],
        )

    def chain(self, paths: Sequence[float]) -> list[int]:
        """Return the nodes, ascending, of the chain that goes on with the most probable child each time."""
        return self._chain_of(range(len(paths)), paths)

    def _chain_of(self, nodes: Iterable[int], chances: Sequence[float]) -> list[int]:
        """Return the chain of the likeliest child each time, the first of equal ones, among some ascending nodes."""
        likeliest: dict[int, int] = {}
        for node in nodes:
            first = likeliest.setdefault(self.parents[node], node)
            if chances[node] > chances[first]:
                likeliest[self.parents[node]] = node
        result, last = list[int](), -1
        while last in likeliest:
            last = likeliest[last]
            result.append(last)
        return result
