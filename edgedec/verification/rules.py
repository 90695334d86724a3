"""Verification rules: their contract, those that are installed, and what one that does nothing of its own says.

A rule is given the target, the drafter's distributions and random numbers. The opt-in rules are plug-ins of the group
`edgedec.rules`, found by their names.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from edgedec import plugins
from edgedec.draft import CHAIN, Draft, Siblings, TreeShape, Verification
from edgedec.drafter_traits import Draws
from edgedec.sampling import Distribution
from edgedec.sequence import COUPLED

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
            tree shape of a plug-in, with its numbers.
        on_chains: The name of the rule that does the same on a chain; None where no other rule does.
    """

    verify: Verify
    siblings: Siblings | None = None
    shape: str = CHAIN
    on_chains: str | None = None


def rule_names() -> list[str]:
    """Return the names of all rules, the default first; those of edgedec stand before other packages'."""
    return [COUPLED, *plugins.plugins(plugins.RULES)]


def find_rule(name: str) -> Rule:
    """Return the opt-in rule of that name.

    Raises:
        PluginError: No such rule is installed, it does not import, or it is no Rule.
    """
    return plugins.load_of_type(plugins.RULES, name, Rule)


def rule_notes(rule: str, shape: TreeShape, draws: Iterable[Draws], *, greedy: bool) -> list[str]:
    """Return sentences on what the rule and the shape of a generation do not do; none where both are of use.

    Args:
        rule: The rule of verification.
        shape: The shape of drawn drafts.
        draws: What the drafters of the generation draw.
        greedy: Whether tokens are drawn at temperature 0.
    """
    draws, on_chains = set(draws), None if rule == COUPLED else find_rule(rule).on_chains
    named = f"the rule {rule}"
    if rule != COUPLED and greedy:
        return [f"{named} changes nothing at temperature 0: the most probable token is taken under every rule"]
    if Draws.UNKNOWN in draws:
        return []
    if Draws.SHAPES in draws:
        same = on_chains if shape.kind == CHAIN else None
        return [f"{named} does what {same} does, as drafts are chains"] if same is not None else []
    who = "only a draft model with the target's tokenizer and a trained head make trees of a shape"
    if Draws.CHAINS in draws:
        if on_chains is not None:
            return [f"{named} does what {on_chains} does: {who}, others a chain"]
    elif rule != COUPLED:
        return [
            f"{named} gains nothing: all guesses are looked up, and none is drawn; only a draft model, a "
            "trained head and the model's own layers draw"
        ]
    return [] if shape.kind == CHAIN else [f"the shape {shape} has no effect: {who}"]
