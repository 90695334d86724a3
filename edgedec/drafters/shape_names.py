"""From the name of a shape of drafted trees to the shape, and which shapes a verification rule is exact for."""

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from edgedec import plugins
from edgedec.draft import CHAIN, GROW, ONE_CHAIN, TreeShape
from edgedec.drafters.drawn_trees import DrawnShape, find_shape
from edgedec.errors import OptionError, PluginError
from edgedec.sequence import COUPLED

if TYPE_CHECKING:
    from edgedec.verification.rules import Rule

_MOST_WIDE = 64
_WIDE = 2  # branches of a shape that names no number


def parse_shape(text: object) -> TreeShape:
    """Return the shape that a text names, such as "grow" or, where these shapes are installed, "siblings:3-2".

    >>> parse_shape("siblings:3-2").widths
    (3, 2)

    Raises:
        OptionError: The text names no shape.
        PluginError: The shape does not import.
    """
    kind, colon, numbers = text.partition(":") if isinstance(text, str) else ("", "", "")
    is_known = kind in plugins.plugins(plugins.TREE_SHAPES)
    n_widths = find_shape(kind).n_widths if is_known else 0
    parts = numbers.split("-") if colon else [str(_WIDE)] * min(n_widths, 1)
    holds = all(part.isascii() and part.isdigit() and 1 <= int(part[:9]) <= _MOST_WIDE for part in parts)
    if not (is_known or kind == CHAIN) or not holds or len(parts) > n_widths:
        named = [name + ("", ":K", ":K-L")[min(shape.n_widths, 2)] for name, shape in _installed()]
        expected = f"it must be one of {', '.join([CHAIN, *named])}, with numbers from 1 to {_MOST_WIDE}"
        raise OptionError("draft_tree", text, expected)
    return TreeShape(kind, tuple(map(int, parts)))


def shape_for(rule: str, wish: TreeShape | None, *, trees: bool, greedy: bool) -> tuple[TreeShape, tuple[str, ...]]:
    """Return the shape of drafts that a rule verifies exactly, and a sentence where it is not what the options say.

    Args:
        rule: The rule of verification.
        wish: The shape that the user named, or None.
        trees: Whether trees may be verified.
        greedy: Whether tokens are drawn at temperature 0, where nothing is drawn and the coupled rule's shapes hold.

    Raises:
        PluginError: The rule is not installed, or the shape that the user named is not.
    """
    coupled = greedy or rule == COUPLED
    default = ONE_CHAIN if coupled else parse_shape(_rule(rule).shape)
    shape, why = default if wish is None else wish, ""
    if shape.kind not in (CHAIN, default.kind) and not _fits(rule, shape.kind, find_shape(shape.kind), coupled=coupled):
        fitting = [name for name, found in _installed() if _fits(rule, name, found, coupled=coupled)]
        kinds = dict.fromkeys((default.kind, *fitting, CHAIN))
        by = "at temperature 0" if greedy else f"under the rule {rule}"
        shape, why = default, f"the shape {wish} is not used {by}, where drafts are {' or '.join(kinds)}"
    if shape.kind != CHAIN and not trees:
        shape, why = ONE_CHAIN, f"drafts are chains instead of {shape}: this runtime verifies no trees exactly"
    return shape, (why,) if why else ()


def _fits(rule: str, kind: str, shape: DrawnShape, *, coupled: bool) -> bool:
    """Return whether a rule verifies trees of a shape exactly; the coupled one takes trees of most probable tokens."""
    return kind == GROW if coupled else _rule(rule).siblings == shape.siblings


def _rule(name: str) -> "Rule":
    from edgedec.verification.rules import find_rule

    return find_rule(name)


def _installed() -> Iterator[tuple[str, DrawnShape]]:
    """Yield the shapes that are installed and work, by name."""
    for name in plugins.plugins(plugins.TREE_SHAPES):
        with suppress(PluginError):
            yield name, find_shape(name)
