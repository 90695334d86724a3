"""forced: the tokens that a grammar forces, put into drafts before the nodes of other drafters.

Forced tokens need no logits to be chosen; they only have to get into the KV cache: jump-forward decoding (Zheng et al.
2023, arXiv:2312.07104). Here they are nodes of a draft, so verification decides about them as about all others.
"""

from time import perf_counter

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.draft import Draft
from edgedec.draft_constants import NEXT_TO_NOTHING
from edgedec.scheduler.draft_tree import DraftTree
from edgedec.sequence import n_common
from edgedec.stats import DecodeStats

_NAME = "forced"


class ForcedDrafts:
    """Puts forced tokens into the drafts of one generation, and removes the nodes that the grammar rules out.

    Args:
        constraint: The grammar of the generation.
        n_max: Most nodes of a draft.
        curve: The cost curve by which the number of forced tokens is chosen; None takes all of them.
        coupled: Whether the verification rule is the coupled one.
    """

    def __init__(self, constraint: Constraint, n_max: int, curve: CostCurve | None, *, coupled: bool) -> None:
        self._constraint = constraint
        self._n_max = n_max
        self._curve = curve
        self._coupled = coupled
        self._chain: tuple[int, ...] = ()

    def add_to(self, draft: Draft, stats: DecodeStats, n_past: int, n_max: int) -> Draft:
        """Return a draft of the forced tokens and of the nodes of `draft` that the grammar allows.

        A draft that was drawn from q, for a rule that looks at q, is returned as it is: removing what was drawn would
        change the distribution of the text, and the rule itself rejects a token whose p is 0.

        Args:
            draft: What drafters proposed, at most `n_max` nodes.
            stats: The statistics in which forced tokens are counted.
            n_past: Cached tokens.
            n_max: Most nodes that there is room for.
        """
        started = perf_counter()
        self._chain = ()
        if not self._coupled and draft.q is not None and any(law is not None for law in draft.q):
            return draft
        forced = self._constraint.forced()
        self._chain = self._worth(forced[: min(n_max, self._n_max)], n_past)
        allowed = self._kept(draft, forced)
        if self._chain:
            tree = DraftTree()
            for part in (Draft.chain(self._chain), allowed):
                tree.add(part.tokens, part.parents, part.p_accept)
            allowed = Draft.tree(tree.tokens, tree.parents, tree.p).truncated(min(n_max, self._n_max))
            stats.count_proposal(_NAME, len(self._chain), perf_counter() - started)
        return allowed

    def score(self, stats: DecodeStats, token_ids: tuple[int, ...]) -> None:
        """Count how many of the latest forced tokens `token_ids`, the tokens of the step, begin with."""
        if not self._chain:
            return
        n_right = n_common(self._chain, token_ids, len(self._chain))
        stats.count_outcome(_NAME, min(len(self._chain), n_right + 1), n_right)

    def _worth(self, forced: tuple[int, ...], n_past: int) -> tuple[int, ...]:
        """Return as many of the forced tokens as give the most tokens per second, where all of them are right.

        All of them are returned where so many rows were never timed and lose nothing by the curve: that times them.
        """
        if self._curve is None or not forced:
            return forced
        cost = self._curve.up_to(len(forced) + 1, n_past)
        loses = cost[-1] > (1 + NEXT_TO_NOTHING) * len(cost) * cost[0]
        if self._curve.is_unknown(len(cost)) and not loses:
            return forced
        return forced[: max(range(len(cost)), key=lambda n: (n + 1) / cost[n])]

    def _kept(self, draft: Draft, forced: tuple[int, ...]) -> Draft:
        """Return the nodes that the grammar allows; where a token is forced, it allows no other token."""
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        places = {-1: -1}
        p_accept: list[float] = []
        parts = zip(draft.tokens, draft.parents, draft.p_accept, strict=True)
        for node, (token, parent, p) in enumerate(parts):
            path = paths.get(parent)
            if path is None or (len(path) < len(forced) and token != forced[len(path)]):
                continue
            if self._constraint.allows(path, token):
                places[node] = len(p_accept)
                paths[node] = (*path, token)
                p_accept.append(p)
        if len(p_accept) == len(draft):
            return draft
        nodes = [node for node in places if node >= 0]
        parents = [places[int(draft.parents[node])] for node in nodes]
        return Draft.tree([int(draft.tokens[node]) for node in nodes], parents, p_accept)
