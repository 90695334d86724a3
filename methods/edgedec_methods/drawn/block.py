"""Block verification: a drafted chain is verified as a whole, which accepts at least as much as token by token.

Paper: Sun et al. 2024, arXiv:2403.10444
Option: `--draft-option rule=block`
For: comparing rules that keep the distribution, not the text
Measured: 46.4 tokens/s with a head at temperature 1, where `coupled` has 54.2 (`studies/drawn_trees`, program at
    67b59fb8)
Status: study
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgedec.draft import Draft, Verification
from edgedec.sampling import Distribution
from edgedec.verification.rules import TargetRow
from edgedec_methods.drawn.recursive import verify_recursive
from edgedec_methods.drawn.rule_tools import (
    Uniform,
    excess,
    in_turn,
    laws_of,
    path_to,
    probability,
    residual,
    sample,
)
from edgedec_methods.drawn.rules import Rule


@dataclass(frozen=True, slots=True)
class Drawn:
    """A node of the path that is being verified.

    Attributes:
        node: The node's index in the draft.
        token: The node's token.
        p: The target's distribution at its position.
        q: The distribution that the token was drawn from.
        weight: The chance that the path before the node is accepted, given the path.
    """

    node: int
    token: int
    p: Distribution
    q: Distribution
    weight: float

    @property
    def weight_after(self) -> float:
        """The chance that the path is accepted up to and with this node, given the path."""
        return min(1.0, self.weight * probability(self.p, self.token) / probability(self.q, self.token))

    @property
    def stop(self) -> float:
        """The chance that the path before this node is accepted, given that no longer part of the path was."""
        above = float(excess(self.p, self.q, self.weight).sum())
        return above / (above + 1 - self.weight) if self.weight < 1 else 1.0


def verify_block(draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform) -> Verification:
    """Verify a chain as a whole, by weights min(1, weight p(x) / q(x)); it accepts at least as much as token by token.

    The rule assumes a chain, each node drawn from its q given the nodes before it, with random numbers that no earlier
    step looked at: whether a token is accepted depends on the tokens after it. A node without a q counts as drawn from
    a point mass. Where the chain ends may depend on its tokens. A tree is passed on to verify_recursive.

    `target` is called for every row up to the first token that p rules out, and for the last row only if the whole
    chain is accepted; the rest is as of Verify.
    """
    if not draft.is_chain:
        return verify_recursive(draft, q, target, uniform)
    path: list[Drawn] = []
    weight, tokens = 1.0, draft.tokens
    for node, law in enumerate(laws_of(draft, q)):
        path.append(Drawn(node, tokens[node], target(node, tokens[:node]), law, weight))
        weight = path[-1].weight_after
        if weight == 0:
            break
    return verify_path(draft, path, target, in_turn(uniform))


def verify_path(draft: Draft, path: Sequence[Drawn], target: TargetRow, numbers: Iterator[float]) -> Verification:
    """Verify one path, the longest part first: the first part that passes its test is accepted.

    Args:
        draft: What was proposed.
        path: One node of the draft for each token, root first; the last node may hold a token that p rules out. A
            node's parent is the node before it in the path, or another node with the same text.
        target: Gives p at a row; called for no row but the one after the whole path.
        numbers: Random numbers: one for each part that is tested, one for the token that follows.
    """
    tokens = tuple(drawn.token for drawn in path)
    if not path or next(numbers) < path[-1].weight_after:
        n, row = len(path), path[-1].node + 1 if path else 0
        p = target(row, tokens)
    else:
        n = next((n for n in range(len(path) - 1, 0, -1) if next(numbers) < path[n].stop), 0)
        p = residual(path[n].p, path[n].q, path[n].weight)
    nodes = path_to(draft, path[n - 1].node) if n else ()
    return Verification(nodes, (*tokens[:n], sample(p, next(numbers))))


RULE = Rule(verify_block)
