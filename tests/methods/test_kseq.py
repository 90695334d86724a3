"""K-SEQ keeps the distribution, and accepts as its equation says."""

import numpy as np
import pytest
from support.decoding.exact_distributions import paths
from support.decoding.rule_checks import EVERY_RULE, RULES_OF_PATHS, Check, check_exact, models, tree

from edgedec.draft import Verification
from edgedec.sampling import Distribution
from edgedec_methods.drawn.rules import find_rule


@pytest.mark.slow
@pytest.mark.parametrize("check", [*EVERY_RULE, *RULES_OF_PATHS])
def test_the_rule_keeps_its_promises(check: Check) -> None:
    """What holds for every rule, and for those of its kind."""
    check("kseq")


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
    """A point mass as a q is what None is."""
    target, _ = models(53, 3, 2)
    mass = Distribution(np.array([1]), np.ones(1))
    draft = tree([1, 1], [-1, -1])
    given = check_exact("kseq", [(1.0, draft, [mass, mass])], target, 3, 2)
    assert given == check_exact("kseq", [(1.0, draft, [None, None])], target, 3, 2)
    assert given == pytest.approx(target(())[1], abs=1e-12)


def test_a_token_may_be_drawn_twice_from_one_q() -> None:
    """K-SEQ takes it for the second draw that it is, where recursive rejection refuses it."""
    p = Distribution(np.array([4, 5]), np.array([0.5, 0.5]))
    q = Distribution(np.array([4, 6]), np.array([0.75, 0.25]))
    found = find_rule("kseq").verify(tree([4, 4], [-1, -1]), [q, q], lambda row, accepted: p, lambda k: 0.999)
    assert found == Verification((), (5,))
