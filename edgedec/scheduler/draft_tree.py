"""The proposals of several drafters as one tree, and the nodes of it that are worth verifying.

Proposals are merged by longest prefix, and what was found in a text is pruned by what a model says (RASD, Quan et al.
2025, arXiv:2503.03434). Nodes are taken in order of path probability, which gives the best tree of every size (DySpec,
Xiong et al. 2024, arXiv:2410.11744).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from edgedec.cost_curve import Cost, CostCurve
from edgedec.draft import Draft
from edgedec.draft_constants import CAUTION, NEXT_TO_NOTHING


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

    def drop_improbable(self, draft: Draft, p: Sequence[float]) -> None:
        """Give the branches whose first token a model rules out the probability 0, so that none of them is verified.

        What was found in a text may have nothing to do with what comes now.

        Args:
            draft: The model's draft, which is in the tree: its first level holds the most probable tokens.
            p: P(node accepted | parent accepted) of the draft's nodes, as corrected.
        """
        firsts = zip(draft.tokens, draft.parents, p, strict=True)
        roots = {token: chance for token, parent, chance in firsts if parent < 0}
        # The model's other tokens are less probable than the least of these, and have the rest together.
        if not roots or min(min(roots.values()), max(0.0, 1.0 - sum(roots.values()))) >= NEXT_TO_NOTHING:
            return
        for place, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent < 0 and token not in roots:
                self._sums[-1] -= self.p[place]
                self.p[place] = 0.0

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
        order = list(dict.fromkeys([*self._chain_of(nodes, self.p), *nodes]))
        places, parents = dict(zip(order, range(len(order)), strict=True)), map(self.parents.__getitem__, order)
        return Draft(
            tuple(map(self.tokens.__getitem__, order)),
            tuple([places.get(parent, -1) for parent in parents]),
            tuple(map(self.p.__getitem__, order)),
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


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """How a generation drafts.

    Attributes:
        n_max: Most nodes of a draft.
        always: Whether to verify what is proposed, whatever it costs.
        coupled: Whether the verification rule is the coupled one, which ignores q.
        trees: Whether trees may be verified; otherwise chains only.
    """

    n_max: int
    always: bool = False
    coupled: bool = True
    trees: bool = True


@dataclass(frozen=True, slots=True)
class Expected:
    """What is expected of a step.

    Attributes:
        n_nodes: The nodes that it verifies.
        tokens: Tokens that it gives, those of other requests included.
        seconds: What its forward takes.
    """

    n_nodes: int
    tokens: float
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Gain:
    """What a draft is worth to its step, before and after the forward.

    Attributes:
        before: What was expected of the step without the draft.
        after: What was expected of the step with the draft.
        rate: Tokens per second that a token is measured by.
        beside_s: Seconds spent on the draft outside the drafter's own call: to teach the drafter, to merge, to choose.
    """

    before: Expected
    after: Expected
    rate: float
    beside_s: float

    def seconds(self, tokens: float, forward_s: float) -> float:
        """Return the seconds that the draft gained by a step of so many tokens, those of other requests included.

        A forward that took far longer than expected was disturbed.
        """
        forward_s = min(forward_s, CAUTION * self.after.seconds)
        return (tokens - self.before.tokens) / self.rate - (forward_s - self.before.seconds) - self.beside_s

    @property
    def expected_s(self) -> float:
        """The seconds that the draft was expected to gain."""
        return self.seconds(self.after.tokens, self.after.seconds)


@dataclass(slots=True)
class Choice:
    """The proposals before one step, and those of their nodes that are chosen to be verified.

    Attributes:
        curve: The session's cost curve, which knows what keeping a branch costs and what others gain.
        options: How to draft.
        cost: Seconds of the step by the number of nodes in it; 0 nodes are the plain step.
        n_max: Most nodes.
        room: Tokens that the text may still grow by.
        tree: The proposals.
        paths: P(path to the node accepted) of every node.
        nodes: The chosen nodes, ascending.
        rate: The tokens per second that are expected then, those of all requests together; 0 for options.always.
    """

    curve: CostCurve
    options: PolicyOptions
    cost: Cost
    n_max: int
    room: int
    tree: DraftTree = field(default_factory=DraftTree)
    paths: list[float] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    rate: float = 0.0
    _expected: "Expected | None" = None  # as long as nothing else is chosen

    def choose(self, cost: Cost, spent_s: float = 0.0) -> None:
        """Choose among all proposals; the arguments are those of best()."""
        self.paths, self._expected = self.tree.paths(), None
        self.nodes, self.rate = self.best(cost, spent_s)

    def best(self, cost: Cost, spent_s: float = 0.0) -> tuple[list[int], float]:
        """Return the nodes that are best where steps cost this and drafting took `spent_s` seconds, and their rate."""
        paths, tree, n_max = self.paths, self.tree, self.n_max
        if self.options.always:
            candidates = range(len(paths)) if self.options.trees else tree.chain(paths)
            candidates = [node for node in candidates if paths[node] > 0]  # others were ruled out
            return sorted(sorted(candidates, key=paths.__getitem__, reverse=True)[:n_max]), 0.0
        keep_s, others = self.curve.keep_s, self.curve.others
        if not self.options.trees:
            return best_part(paths, tree.chain(paths), cost, n_max, spent_s, others)
        nodes, rate = best_part(paths, range(len(paths)), cost, n_max, spent_s, others)
        is_free = not nodes or keep_s < NEXT_TO_NOTHING * cost(0)
        if is_free or all(tree.parents[node] == last for last, node in pairwise([-1, *nodes])):
            return nodes, rate
        # Keeping a branch costs something: the best part of a tree that pays for it, or of the likeliest chain.
        whole = best_part(paths, range(len(paths)), lambda n: cost(n) + (keep_s if n else 0.0), n_max, spent_s, others)
        chain = best_part(paths, tree.chain(paths), cost, n_max, spent_s, others)
        return whole if whole[1] > chain[1] else chain

    @property
    def expected(self) -> Expected:
        """What is expected of the step with the nodes that choose() has chosen."""
        if self._expected is None:
            self._expected = self.expected_of([self.paths[node] for node in self.nodes])
        return self._expected

    def expected_of(self, paths: Sequence[float], n_nodes: int | None = None) -> Expected:
        """Return what is expected of a step of `n_nodes` nodes, by default as many as there are path probabilities."""
        n = len(paths) if n_nodes is None else n_nodes
        return Expected(n, 1 + self.curve.others + sum(paths), self.cost(n))


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
