"""Token-wise rejection keeps the distribution, and accepts the product of ratios."""

import numpy as np
import pytest
from support.decoding.exact_distributions import integrate, joint_of, paths
from support.decoding.rule_checks import EVERY_RULE, RULES_OF_CHAINS, Check, models

from edgedec_methods.drawn.rules import find_rule


@pytest.mark.slow
@pytest.mark.parametrize("check", [*EVERY_RULE, *RULES_OF_CHAINS])
def test_the_rule_keeps_its_promises(check: Check) -> None:
    """What holds for every rule, and for those of its kind."""
    check("tokenwise")


def test_tokenwise_accepts_the_product_of_ratios() -> None:
    """The expected length is the sum over depths of the product of min(1, p / q), averaged over q."""
    target, q = models(41, 3, 4)
    expected = 0.0
    for depth in (1, 2, 3):
        for text, drawn in np.ndenumerate(joint_of(q, 3, depth)):
            ratios = [target(text[:i])[text[i]] / q(text[:i])[text[i]] for i in range(depth)]
            expected += drawn * np.prod(np.minimum(1, ratios))
    n_accepted = integrate(find_rule("tokenwise").verify, paths(q, 3, 3, 1), target, 3, 4).n_accepted
    assert n_accepted == pytest.approx(expected, abs=1e-12)
