"""What a verification rule is given: the target, the drafter's distributions and random numbers."""

from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Protocol

from edgedec.draft import Draft, Verification
from edgedec.errors import PluginError
from edgedec.sampling import Distribution
from edgedec.verification.distributions import point_mass, probability

TargetRow = Callable[[int, tuple[int, ...]], Distribution]
"""`(row, the draft's tokens up to it)` -> p after that row: row 0 the last token before it, row i + 1 node i."""

Uniform = Callable[[int], float]
"""`k` -> the k-th random number of this step, above 0 and below 1."""


class Rule(Protocol):
    """A verification rule: a pure function of what it is given. It asks for p at most once a row."""

    def __call__(
        self, draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform, /
    ) -> Verification: ...


def laws_of(draft: Draft, q: Sequence[Distribution | None]) -> list[Distribution]:
    """Return what each node was drawn from; a token proposed without chance (None) was drawn from a point mass.

    Raises:
        PluginError: There is not one entry a node, or a node holds a token that its q rules out.
    """
    if len(q) != len(draft):
        raise PluginError(f"a draft of {len(draft)} nodes came with {len(q)} distributions; q needs one a node")
    laws = []
    for node, (token, law) in enumerate(zip(draft.tokens.tolist(), q, strict=True)):
        if law is not None and probability(law, token) == 0:
            raise PluginError(
                f"node {node} holds token {token}, to which its q gives probability 0; q must be what it was drawn from"
            )
        laws.append(point_mass(token) if law is None else law)
    return laws


def in_turn(uniform: Uniform) -> Iterator[float]:
    """Yield the random numbers of this step, one after the other."""
    return map(uniform, count())
