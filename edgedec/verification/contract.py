"""The contract of a verification rule: it is given the target, the drafter's distributions and random numbers."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from edgedec.draft import CHAIN, Draft, Siblings, Verification
from edgedec.errors import PluginError
from edgedec.sampling import Distribution
from edgedec.verification.distributions import point_mass, probability

TargetRow = Callable[[int, tuple[int, ...]], Distribution]
"""`(row, drafted tokens up to it)` -> p after that row: row 0 is the last token before the draft, i + 1 is node i."""

Uniform = Callable[[int], float]
"""`k` -> the k-th random number of this step, above 0 and below 1."""


class Verify(Protocol):
    """Verifies a draft: a pure function of its arguments, which calls `target` at most once for a row.

    It returns a path of the draft, root first, with the tokens of that path and one more token, drawn from p.
    """

    def __call__(
        self, draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform, /
    ) -> Verification: ...


@dataclass(frozen=True, slots=True)
class Rule:
    """A verification rule, as an entry point of `edgedec.rules` names one.

    Attributes:
        verify: Verifies a draft. Over all drafts that a drafter may draw, and all random numbers, the text that follows
            must have the target's distribution.
        siblings: How the siblings of a drawn tree must be drawn, so that the rule is exact; None for a rule that only
            verifies chains.
        shape: The name of the shape that drafts have under this rule, unless the user names another one: "chain", or a
            plug-in of `edgedec.tree_shapes` with its numbers.
        on_chains: The name of the rule that does the same on a chain; None where no other rule does.
    """

    verify: Verify
    siblings: Siblings | None = None
    shape: str = CHAIN
    on_chains: str | None = None


def laws_of(draft: Draft, q: Sequence[Distribution | None]) -> list[Distribution]:
    """Return the distribution that each node was drawn from: its q, or a point mass for a node that was looked up.

    Raises:
        PluginError: q has not one entry for each node, or a node holds a token that its q rules out.
    """
    if len(q) != len(draft):
        raise PluginError(
            f"a draft of {len(draft)} nodes came with {len(q)} distributions in q; q must have one for each node"
        )
    laws = []
    for node, (token, law) in enumerate(zip(draft.tokens, q, strict=True)):
        if law is not None and probability(law, token) == 0:
            raise PluginError(
                f"node {node} holds token {token}, which its q gives the probability 0; q must be the distribution "
                "that the token was drawn from"
            )
        laws.append(point_mass(token) if law is None else law)
    return laws


def in_turn(uniform: Uniform) -> Iterator[float]:
    """Yield the random numbers of a step, one after the other."""
    return map(uniform, count())
