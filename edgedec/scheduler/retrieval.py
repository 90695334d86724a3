"""Retrieved branches are pruned by the first distribution of a model that drafts, before they are merged.

RASD (Quan et al. 2025, arXiv:2503.03434): what was found in a text may have nothing to do with what comes now. Where a
draft model or a head has drafted as well, it says how probable the first token of each retrieved branch is.
"""

from collections.abc import Sequence

from edgedec.draft import Draft
from edgedec.scheduler.draft_tree import DraftTree

LEAST_FIRST = 0.01
"""A retrieved branch is dropped where the model holds its first token less probable than this."""


def drop_improbable(tree: DraftTree, draft: Draft, p: Sequence[float]) -> None:
    """Give the branches of a tree that a model rules out the probability 0, so that no node of them is verified.

    Args:
        tree: The proposals, the model's draft included.
        draft: The model's draft: its first level holds the most probable tokens.
        p: P(node accepted | parent accepted) of the draft's nodes, as corrected.
    """
    roots = {token: chance for token, parent, chance in zip(draft.tokens, draft.parents, p, strict=True) if parent < 0}
    if not roots:
        return
    # The model's other tokens are less probable than the least of these, and have the rest together.
    others = min(min(roots.values()), max(0.0, 1.0 - sum(roots.values())))
    if others < LEAST_FIRST:
        tree.drop_roots(lambda token: token not in roots)
