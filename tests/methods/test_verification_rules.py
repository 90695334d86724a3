"""The guests' rules of verification keep the distribution, and accept as their theorems and equations say."""

import numpy as np
import pytest
from support.decoding.exact_distributions import integrate, joint_of, paths
from support.decoding.rule_checks import (
    EVERY_RULE,
    RULES_OF_CHAINS,
    RULES_OF_PATHS,
    Check,
    block_length,
    check_exact,
    models,
    tree,
)

from edgedec.draft import Verification
from edgedec.sampling import Distribution
from edgedec_methods.drawn.rules import find_rule

RULES = {"block": RULES_OF_CHAINS, "tokenwise": RULES_OF_CHAINS, "multipath": RULES_OF_PATHS, "kseq": RULES_OF_PATHS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "check"), [(rule, check) for rule, of_its_kind in RULES.items() for check in [*EVERY_RULE, *of_its_kind]]
)
def test_a_rule_keeps_its_promises(rule: str, check: Check) -> None:
    """What holds for every rule, and for those of its kind."""
    check(rule)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_block_accepts_its_weights_and_never_less_than_tokenwise(seed: int) -> None:
    """On random models, near to each other and far apart."""
    target, q = models(seed, 3, 4, share=(seed + 1) / 8)
    drawings = paths(q, 3, 3, 1)
    block = integrate(find_rule("block").verify, drawings, target, 3, 4).n_accepted
    assert block == pytest.approx(block_length(target, q, 3, 3), abs=1e-12)
    assert block >= integrate(find_rule("tokenwise").verify, drawings, target, 3, 4).n_accepted


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


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_multipath_accepts_more_than_one_path(seed: int) -> None:
    """By choosing among paths, on these models; that it is so on all of them is not proven."""
    target, q = models(seed, 3, 3, share=(seed + 1) / 6)
    n_accepted = integrate(find_rule("multipath").verify, paths(q, 3, 2, 2), target, 3, 3).n_accepted
    assert n_accepted > block_length(target, q, 3, 2)


@pytest.mark.slow
def test_kseq_accepts_as_its_equation_says() -> None:
    """rho solves 1 - (1 - b)^k = rho b; one stands at least that often, and no oftener than one could."""
    target, q = models(43, 4, 2)
    p, drawn, k = target(()), q(()), 3
    for rho in np.linspace(1, k, 200_001):
        b = np.minimum(drawn, p / rho).sum()
        if 1 - (1 - b) ** k <= rho * b:
            break
    n_accepted = check_exact("kseq", paths(q, 4, 1, k), target, 4, 2)
    assert n_accepted >= 1 - (1 - b) ** k - 1e-4
    assert n_accepted <= np.minimum(p, 1 - (1 - drawn) ** k).sum()


def test_the_same_tokens_under_one_q_are_two_draws_for_kseq() -> None:
    """A point mass as a q is what None is; recursive rejection would refuse the second draw."""
    target, _ = models(53, 3, 2)
    mass = Distribution(np.array([1]), np.ones(1))
    draft = tree([1, 1], [-1, -1])
    by_q = check_exact("kseq", [(1.0, draft, [mass, mass])], target, 3, 2)
    assert by_q == check_exact("kseq", [(1.0, draft, [None, None])], target, 3, 2)
    assert by_q == pytest.approx(target(())[1], abs=1e-12)
    p = Distribution(np.array([4, 5]), np.array([0.5, 0.5]))
    q = Distribution(np.array([4, 6]), np.array([0.75, 0.25]))
    verified = find_rule("kseq").verify(tree([4, 4], [-1, -1]), [q, q], lambda row, accepted: p, lambda k: 0.999)
    assert verified == Verification((), (5,))
