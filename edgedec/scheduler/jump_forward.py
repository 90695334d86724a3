"""forced: the tokens that a grammar leaves no choice about, before what other drafters propose.

They need no logits to be chosen, only to be in the KV cache: jump-forward decoding (Zheng et al. 2023,
arXiv:2312.07104), here as a draft, so that verification decides about them as about any other.
"""

from time import perf_counter

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.draft import Draft
from edgedec.scheduler.draft_tree import DraftTree
from edgedec.stats import DecodeStats

_NAME = "forced"
_EQUAL = 1.001  # times


class ForcedDrafts:
    """Puts forced tokens into the drafts of one generation, and takes out what its grammar rules out.

    Args:
        constraint: The grammar's.
        n_max: Most nodes of a draft.
        curve: The cost of forwards, by which the number of tokens is chosen; None takes all.
        coupled: Whether the verification rule is the coupled one.
    """

    def __init__(self, constraint: Constraint, n_max: int, curve: CostCurve | None, *, coupled: bool) -> None:
        self._constraint = constraint
        self._n_max = n_max
        self._curve = curve
        self._coupled = coupled
        self._chain: tuple[int, ...] = ()

    def add_to(self, draft: Draft, stats: DecodeStats, n_past: int, n_max: int) -> Draft:
        """Return a draft of forced tokens with the nodes of `draft` that the grammar has a place for.

        A draft drawn from q, for a rule that looks at q, is returned as it is: to leave out what was drawn would change
        the text's distribution, and the rule itself rejects a token to which p gives nothing.

        Args:
            draft: What drafters proposed, at most `n_max` nodes.
            stats: Where forced tokens are counted.
            n_past: Cached tokens.
            n_max: Most nodes that there is room for.
        """
        started = perf_counter()
        self._chain = ()
        if not self._coupled and draft.q is not None and any(law is not None for law in draft.q):
            return draft
        forced = self._constraint.forced()
        self._chain = self._worth(forced[: min(n_max, self._n_max)], n_past)
        kept = self._kept(draft, forced)
        if self._chain:
            tree = DraftTree()
            for part in (Draft.chain(self._chain), kept):
                tree.add(part.tokens.tolist(), part.parents.tolist(), part.p_accept.tolist())
            kept = Draft.tree(tree.tokens, tree.parents, tree.p).truncated(min(n_max, self._n_max))
            stats.count_proposal(_NAME, len(self._chain), perf_counter() - started)
        return kept

    def score(self, stats: DecodeStats, token_ids: tuple[int, ...]) -> None:
        """Count how many of the forced tokens came."""
        if not self._chain:
            return
        n_right = 0
        while n_right < min(len(self._chain), len(token_ids)) and self._chain[n_right] == token_ids[n_right]:
            n_right += 1
        stats.count_outcome(_NAME, min(len(self._chain), n_right + 1), n_right)

    def _worth(self, forced: tuple[int, ...], n_past: int) -> tuple[int, ...]:
        """Return as many of the tokens as give the most tokens per second, all of them being right.

        Where so many rows were never timed and lose nothing by the curve, they show what so many rows take.
        """
        if self._curve is None or not forced:
            return forced
        cost = self._curve.up_to(len(forced) + 1, n_past)
        loses = cost[-1] > _EQUAL * len(cost) * cost[0]
        if self._curve.is_unknown(len(cost)) and not loses:
            return forced
        return forced[: max(range(len(cost)), key=lambda n: (n + 1) / cost[n])]

    def _kept(self, draft: Draft, forced: tuple[int, ...]) -> Draft:
        """Return the nodes that the grammar has a place for; where a token is forced, only that one is ever drawn."""
        paths: dict[int, tuple[int, ...]] = {-1: ()}
        places = {-1: -1}
        p_accept: list[float] = []
        parts = zip(draft.tokens.tolist(), draft.parents.tolist(), draft.p_accept.tolist(), strict=True)
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
