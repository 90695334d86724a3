"""Sentences for the statistics where a verification rule or a shape of trees has nothing of its own to do."""

from collections.abc import Iterable

from edgedec.draft import Drafter
from edgedec.drafters.draft_model.cascade import CascadeDrafter
from edgedec.drafters.draft_model.model import ModelDrafter
from edgedec.drafters.head.head import HeadDrafter
from edgedec.drafters.self_speculation.self_draft import SelfDrafter
from edgedec.scheduler.plugin_guard import Guarded
from edgedec.sequence import COUPLED
from edgedec.tree_shapes import CHAIN, TreeShape
from edgedec.verification.rules import find_rule


def rule_notes(rule: str, shape: TreeShape, drafters: Iterable[Drafter], *, greedy: bool) -> list[str]:
    """Return sentences on what the rule and the shape of a generation do not do; none where both are of use.

    Args:
        rule: The rule of verification.
        shape: The shape of drawn drafts.
        drafters: The drafters of the generation; what another package's drafters draw is not known.
        greedy: Whether tokens are drawn at temperature 0.
    """
    drafters, on_chains = tuple(drafters), None if rule == COUPLED else find_rule(rule).on_chains
    named = f"the rule {rule}"
    if rule != COUPLED and greedy:
        return [f"{named} changes nothing at temperature 0: the most probable token is taken under every rule"]
    if any(isinstance(drafter, Guarded) for drafter in drafters):
        return []
    if any(isinstance(drafter, ModelDrafter | CascadeDrafter | HeadDrafter) for drafter in drafters):
        same = on_chains if shape.kind == CHAIN else None
        return [f"{named} does what {same} does, as drafts are chains"] if same is not None else []
    who = "only a draft model with the target's tokenizer and a trained head draft trees of a shape"
    if any(isinstance(drafter, SelfDrafter) for drafter in drafters):
        if on_chains is not None:
            return [f"{named} does what {on_chains} does: {who}, other drafters a chain"]
        return [] if shape.kind == CHAIN else [f"the shape {shape} has no effect: {who}"]
    if rule != COUPLED:
        return [
            f"{named} gains nothing: the drafters in use draw no tokens, they look them up; only a draft model, a "
            "trained head and the model's own layers draw"
        ]
    return [] if shape.kind == CHAIN else [f"the shape {shape} has no effect: {who}"]
