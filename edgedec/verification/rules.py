"""Verification rules other than the coupled one, which guests bring: their contract, and those that are installed."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from edgedec import plugins
from edgedec.draft import Draft, Drawing, Verification
from edgedec.sampling import Distribution, Noise, SamplingParams
from edgedec.sequence import COUPLED

TargetRow = Callable[[int, tuple[int, ...]], Distribution]
"""`(row, drafted tokens up to it)` -> p after that row: row 0 is the last token before the draft, i + 1 is node i."""


@runtime_checkable
class Rule(Protocol):
    """A verification rule, as an entry point of `edgedec.rules` names one."""

    def verified(self, draft: Draft, target: TargetRow, noise: Noise, position: int) -> Verification:
        """Verify the draft of the step whose first new token is at `position`: a function of the arguments alone.

        It returns a path of the draft, root first, with the tokens of that path and one more token. Over all drafts
        that may be drawn, and all random numbers, the text must have the target's distribution.
        """

    def drawing(self, name: str, tree: str | None, sampling: SamplingParams, *, trees: bool) -> Drawing:
        """Return how the drafts of a generation are made of a model's distributions.

        Args:
            name: The rule of verification; "coupled" for trees of the most probable tokens.
            tree: The shape of trees that the user named, or None.
            sampling: How the text's tokens are drawn.
            trees: Whether trees may be verified.

        Raises:
            OptionError: `tree` names no shape that is installed.
            PluginError: The rule is not installed, or the shape does not import.
        """


def rule_names() -> list[str]:
    """Return the names of all rules, the default first; those of edgedec stand before other packages'."""
    return [*dict.fromkeys((COUPLED, *plugins.plugins(plugins.RULES)))]


def find_rule(name: str) -> Rule:
    """Return the rule of a guest of that name; for "coupled" the first of ours: each of them knows how trees are made.

    Raises:
        PluginError: No such rule is installed, it does not import, or it is no Rule.
    """
    name = next(iter(plugins.plugins(plugins.RULES)), name) if name == COUPLED else name
    return plugins.load_of_type(plugins.RULES, name, Rule)  # type: ignore[type-abstract]  # checked at run time
