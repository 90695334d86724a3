"""How drafts are drawn in tests of drafters, as a request with a rule of a guest has it."""

from typing import Any

from edgedec.sampling import SamplingParams
from edgedec_methods.drawn.drawn_trees import TreeShape
from edgedec_methods.drawn.rules import Drawing, cut


def drawn(
    params: SamplingParams, *, coupled: bool = True, shape: TreeShape | None = None, **context: Any
) -> dict[str, Any]:
    """Return the fields of a drafter's context, with how drafts are made under the coupled rule or another one."""
    if coupled and shape is None:
        return context
    rule, q = "coupled" if coupled else "recursive", None if coupled or params.greedy else cut(params)
    return {**context, "drawing": Drawing(rule, shape or TreeShape(), q)}
