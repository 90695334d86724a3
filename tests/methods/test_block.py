"""Block verification keeps the distribution, and accepts as its theorem says."""

import pytest
from support.decoding.exact_distributions import integrate, paths
from support.decoding.rule_checks import EVERY_RULE, RULES_OF_CHAINS, Check, block_length, models

from edgedec_methods.drawn.rules import find_rule


@pytest.mark.slow
@pytest.mark.parametrize("check", [*EVERY_RULE, *RULES_OF_CHAINS])
def test_the_rule_keeps_its_promises(check: Check) -> None:
    """What holds for every rule, and for those of its kind."""
    check("block")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_block_accepts_its_weights_and_never_less_than_tokenwise(seed: int) -> None:
    """On random models, near to each other and far apart."""
    target, q = models(seed, 3, 4, share=(seed + 1) / 8)
    drawings = paths(q, 3, 3, 1)
    block = integrate(find_rule("block").verify, drawings, target, 3, 4).n_accepted
    assert block == pytest.approx(block_length(target, q, 3, 3), abs=1e-12)
    assert block >= integrate(find_rule("tokenwise").verify, drawings, target, 3, 4).n_accepted
