"""Draw first, look after: each token is drawn from the model's distribution, and a drafted one that equals it stands.

The rule looks at no q, so it is exact for any draft. It accepts a token x with the probability p(x), where recursive
rejection accepts it with min(1, p(x) / q(x)).
"""

from collections.abc import Sequence

from edgedec.draft import Draft, Verification
from edgedec.sampling import Distribution
from edgedec.verification.rules import TargetRow
from edgedec_methods.drawn.rule_tools import Uniform, in_turn, sample, walk
from edgedec_methods.drawn.rules import Rule


def verify(draft: Draft, q: Sequence[Distribution | None], target: TargetRow, uniform: Uniform) -> Verification:
    """Draw a token behind each accepted one; go on where a node of the draft holds it, and else end the step."""
    numbers = in_turn(uniform)
    return walk(draft, lambda row, accepted, candidates: sample(target(row, accepted), next(numbers)))


RULE = Rule(verify, siblings="without replacement")
