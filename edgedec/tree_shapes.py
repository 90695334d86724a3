"""Shapes of drafted trees: how a drafter that evaluates a model branches, and which shapes a rule verifies exactly."""

from collections.abc import Mapping
from dataclasses import dataclass

from edgedec.errors import OptionError

CHAIN, PATHS, SIBLINGS, BEAM, GROW = "chain", "paths", "siblings", "beam", "grow"
SHAPES = (CHAIN, PATHS, SIBLINGS, BEAM, GROW)
_MOST_WIDE = 64
_WIDE = 2  # branches of a shape that names no number
_SHAPES_OF: Mapping[str, tuple[str, ...]] = {  # by rule, the shapes that it is exact for; the first is its default
    "coupled": (CHAIN, GROW),
    "tokenwise": (CHAIN,),
    "block": (CHAIN,),
    "recursive": (GROW, SIBLINGS, BEAM, CHAIN),
    "kseq": (PATHS, CHAIN),
    "multipath": (PATHS, CHAIN),
}


@dataclass(frozen=True, slots=True)
class TreeShape:
    """How a drafter that evaluates a model branches.

    Attributes:
        kind: "chain": one token after the other, under the coupled rule with the next best tokens as leaves. "paths":
            chains side by side, drawn independently (SpecTr, arXiv:2310.15141). "siblings": a fixed number of children
            of each node, drawn without replacement (RSD-C, arXiv:2402.14160). "beam": the same number of nodes on every
            level, drawn as paths without replacement (RSD-S, the same paper). "grow": nodes wherever the path
            probability is above a threshold (DySpec, arXiv:2410.11744).
        widths: The number of paths, or of nodes on a level of a beam; of siblings, the children of a node by level, 1
            below the last one. None for a chain and for "grow".
    """

    kind: str = CHAIN
    widths: tuple[int, ...] = ()

    def __str__(self) -> str:
        return ":".join([self.kind, *(["-".join(map(str, self.widths))] if self.widths else [])])


ONE_CHAIN = TreeShape()


def parse_shape(text: object) -> TreeShape:
    """Return the shape that a text names, such as "paths:3", "siblings:3-2" or "grow".

    >>> parse_shape("siblings:3-2").widths
    (3, 2)

    Raises:
        OptionError: The text names no shape.
    """
    kind, colon, numbers = text.partition(":") if isinstance(text, str) else ("", "", "")
    parts = numbers.split("-") if colon else [str(_WIDE)]
    takes_numbers = kind in (PATHS, SIBLINGS, BEAM)
    holds = all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= _MOST_WIDE for part in parts)
    if kind not in SHAPES or not holds or (colon and not takes_numbers) or (kind != SIBLINGS and len(parts) > 1):
        expected = "it must be chain, grow, paths:K, beam:K, or siblings:K (siblings:K-L for two levels that branch)"
        raise OptionError("draft_tree", text, f"{expected}, with numbers from 1 to {_MOST_WIDE}")
    return TreeShape(kind, tuple(map(int, parts)) if takes_numbers else ())


def shape_for(rule: str, wish: TreeShape | None, *, trees: bool, greedy: bool) -> tuple[TreeShape, tuple[str, ...]]:
    """Return the shape of drafts that a rule verifies exactly, and a sentence where it is not what the options say.

    Args:
        rule: The rule of verification.
        wish: The shape that the user named, or None.
        trees: Whether trees may be verified.
        greedy: Whether tokens are drawn at temperature 0, where nothing is drawn and the coupled rule's shapes hold.
    """
    fitting = _SHAPES_OF["coupled" if greedy else rule]
    default = parse_shape(fitting[0])
    shape, why = default if wish is None else wish, ""
    if shape.kind not in fitting:
        by = "at temperature 0" if greedy else f"under the rule {rule}"
        shape, why = default, f"the shape {wish} is not used {by}, where drafts are {' or '.join(fitting)}"
    if shape.kind != CHAIN and not trees:
        shape, why = TreeShape(), f"drafts are chains instead of {shape}: this runtime verifies no trees exactly"
    return shape, (why,) if why else ()
