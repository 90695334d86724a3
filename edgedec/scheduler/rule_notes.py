"""Sentences for the statistics where a verification rule or a shape of trees has nothing of its own to do."""

from collections.abc import Iterable

from edgedec.draft import CHAIN, TreeShape
from edgedec.drafter_traits import Draws
from edgedec.sequence import COUPLED
from edgedec.verification.rules import find_rule


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
    who = "only a draft model with the target's tokenizer and a trained head draft trees of a shape"
    if Draws.CHAINS in draws:
        if on_chains is not None:
            return [f"{named} does what {on_chains} does: {who}, other drafters a chain"]
    elif rule != COUPLED:
        return [
            f"{named} gains nothing: the drafters in use draw no tokens, they look them up; only a draft model, a "
            "trained head and the model's own layers draw"
        ]
    return [] if shape.kind == CHAIN else [f"the shape {shape} has no effect: {who}"]
