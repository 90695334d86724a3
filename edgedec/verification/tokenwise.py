"""Token-wise rejection (Leviathan et al. 2023, arXiv:2211.17192)."""

from collections.abc import Sequence

from edgedec.draft import Draft, Verification
from edgedec.sampling import Distribution
from edgedec.verification.contract import TargetRow, Uniform, in_turn, laws_of
from edgedec.verification.distributions import probability, residual, sample
from edgedec.verification.recursive import verify_recursive
from edgedec.verification.walk import walk


def verify_tokenwise(
    draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform
) -> Verification:
    """Accept each token x with min(1, p(x) / q(x)); replace the first rejected one from what p holds above q.

    Assumes a chain, each node drawn from its q given the nodes before it. A node without a q is accepted with p(x). A
    tree goes to verify_recursive, which this is the case of a chain of.

    Args:
        draft: What was proposed.
        q: What each node was drawn from, None where no chance was involved.
        target: p at a row; asked for the rows of the path.
        uniform: The random numbers of this step.

    Raises:
        PluginError: q does not fit the draft.
    """
    if not draft.is_chain:
        return verify_recursive(draft, q, target, uniform)
    laws, tokens, numbers = laws_of(draft, q), draft.tokens.tolist(), in_turn(uniform)

    def draw_token(row: int, accepted: tuple[int, ...], candidates: Sequence[int]) -> int:
        p = target(row, accepted)
        for node in candidates:  # one, or none after the last
            token: int = tokens[node]
            if next(numbers) < probability(p, token) / probability(laws[node], token):
                return token
            p = residual(p, laws[node])
        return sample(p, next(numbers))

    return walk(draft, draw_token)
