"""Building drafts: trees along the most probable paths, and chains with the next best tokens as leaves beside them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from time import monotonic
from typing import TypeVar

from edgedec.draft import Draft
from edgedec.sampling import Distribution

S = TypeVar("S")

Child = tuple[float, int, float, S]
"""A token that may follow a node: its score, which decides where the tree grows; the token; P(accepted | parent
accepted); the state behind the token."""


@dataclass(slots=True)
class Level:
    """The tokens that a model expects at the next position of a chain.

    Attributes:
        tokens: The first one goes on the chain, the others beside it; none where the chain ends.
        p: P(accepted | parent accepted) of each token.
        q: The distribution that the only token was drawn from; None where the tokens are the most probable ones.
    """

    tokens: list[int]
    p: list[float]
    q: Distribution | None = None


class DraftBuilder:
    """The nodes of a draft that is being built.

    Attributes:
        n_max: Most nodes.
        tokens: Token of each node.
        parents: Index of each node's parent, -1 for the last accepted token.
        p_accept: P(node accepted | parent accepted).
    """

    def __init__(self, n_max: int) -> None:
        self.n_max = n_max
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.p_accept: list[float] = []
        self._laws: list[Distribution | None] = []

    @property
    def n_left(self) -> int:
        """How many more nodes there is room for."""
        return self.n_max - len(self.tokens)

    def add(self, token: int, parent: int, p: float, law: Distribution | None = None) -> int:
        """Add a node below `parent`, which was drawn from `law` (None: looked up), and return its index."""
        self._laws.append(law)
        self.tokens.append(token)
        self.parents.append(parent)
        self.p_accept.append(p)
        return len(self.tokens) - 1

    def add_levels(
        self,
        levels: Iterable[Level],
        *,
        deadline_s: float,
        least_path: float,
        least_leaf: float,
        corrected: Callable[[float], float] = float,
    ) -> int:
        """Add a chain, level by level, with leaves beside it; return how many levels it has.

        The chain ends with the levels, with a level that has no token, when the builder is full, after `deadline_s` on
        the monotonic clock, and where its path probability falls below `least_path`.

        Args:
            levels: Taken one at a time, so that no model evaluates a level that is not needed.
            deadline_s: Looked at after each level.
            least_path: The path probability below which the chain does not go on.
            least_leaf: The path probability below which a token beside the chain is left out.
            corrected: P that the drafter gives to a token of the chain -> P by which the path probability goes.
        """
        n_levels, parent, path, n_max = 0, -1, 1.0, self.n_max
        for level in levels:
            if not level.tokens:
                break
            n_levels += 1
            above, parent = parent, len(self.tokens)
            for i, (token, p) in enumerate(zip(level.tokens, level.p, strict=True)):
                if len(self.tokens) < n_max and (i == 0 or path * p >= least_leaf):
                    self.add(token, above, p, level.q)
            path *= corrected(level.p[0])
            if path < least_path or len(self.tokens) >= n_max or monotonic() > deadline_s:
                break
        return n_levels

    def build(self) -> Draft:
        """Return the draft; with the q of each node where one was drawn."""
        draft = Draft.tree(self.tokens, self.parents, self.p_accept)
        return replace(draft, q=tuple(self._laws)) if any(self._laws) else draft


def grow_tree(
    root: S,
    children: Callable[[S, int], Sequence[Child[S]]],
    *,
    n_max: int,
    least_path: float,
    older_first: bool,
) -> Draft:
    """Grow a tree of at most `n_max` nodes, highest product of scores along the path first.

    Args:
        root: The state behind the text.
        children: `(state, depth)` -> the tokens that may follow, highest score first, none twice; `depth` is how many
            drafted tokens lead to the state.
        n_max: Most nodes.
        least_path: The product of scores below which a path is left out; the root's first child always stays.
        older_first: Which of two paths with equal products comes first: the one whose parent was added first, or else
            the one whose next better sibling or parent was.
    """
    tokens, parents, p_accept, order = list[int](), list[int](), list[float](), 0
    first = children(root, 0) if n_max > 0 else ()
    # minus the path's score, order of equal scores, which of the siblings, and these: the children of a node, the node,
    # its path's score, and how many tokens lead to it
    queue = [(-first[0][0], order, 0, (first, -1, 1.0, 0))] if first else []
    while queue:
        negative, place, rank, family = heappop(queue)
        siblings, parent, _, depth = family
        _, token, p, state = siblings[rank]
        tokens.append(token)
        parents.append(parent)
        p_accept.append(p)
        if len(tokens) == n_max:
            break
        below = children(state, depth + 1), len(tokens) - 1, -negative, depth + 1
        for next_rank, its in ((rank + 1, family), (0, below)):
            if next_rank < len(its[0]):
                score = its[2] * its[0][next_rank][0]
                if score >= least_path:
                    order += 1
                    heappush(queue, (-score, place if older_first and next_rank else order, next_rank, its))
    return Draft.tree(tokens, parents, p_accept)


def path_of(tokens: Sequence[int], parents: Sequence[int], token_ids: Sequence[int], root: int = -1) -> list[int]:
    """Return the nodes below `root` that hold the first of these tokens, in order, as far as the tree has them.

    >>> path_of([5, 6, 7], [-1, 0, 0], [5, 7, 8])
    [0, 2]
    """
    children: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        children.setdefault((parent, token), node)
    path: list[int] = []
    for token in token_ids:
        child = children.get((path[-1] if path else root, token))
        if child is None:
            break
        path.append(child)
    return path
