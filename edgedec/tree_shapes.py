"""Shapes of drafted trees: how a drafter that evaluates a model branches."""

from dataclasses import dataclass
from typing import Literal

CHAIN, GROW = "chain", "grow"

Siblings = Literal["independent", "without replacement"]
"""How the children of a node are drawn from its distribution: it decides which rules verify a tree exactly."""


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a drafter that evaluates a model branches.

    Attributes:
        kind: "chain": one token after the other, under the coupled rule with the next best tokens as leaves. Any other
            kind is a plug-in of the group `edgedec.tree_shapes`, such as "grow": nodes wherever the path probability is
            above a threshold (DySpec, arXiv:2410.11744).
        widths: The numbers behind a kind's name, such as that of paths, or of children by level; none for a kind that
            takes no number.
    """

    kind: str = CHAIN
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *(["-".join(map(str, self.widths))] if self.widths else [])])


ONE_CHAIN = TreeShape()
