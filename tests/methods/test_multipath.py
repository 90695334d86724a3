"""Greedy multi-path block verification keeps the distribution, and accepts more than one path."""

import pytest
from support.decoding.exact_distributions import integrate, paths
from support.decoding.rule_checks import EVERY_RULE, RULES_OF_PATHS, Check, block_length, models

from edgedec_methods.drawn.rules import find_rule


@pytest.mark.slow
@pytest.mark.parametrize("check", [*EVERY_RULE, *RULES_OF_PATHS])
def test_the_rule_keeps_its_promises(check: Check) -> None:
    """What holds for every rule, and for those of its kind."""
    check("multipath")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_choosing_among_paths_accepts_more_than_one_path(seed: int) -> None:
    """On these models; that it is so on all of them is not proven."""
    target, q = models(seed, 3, 3, share=(seed + 1) / 6)
    assert integrate(find_rule("multipath").verify, paths(q, 3, 2, 2), target, 3, 3).n_accepted > block_length(
        target, q, 3, 2
    )
