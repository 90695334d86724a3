"""Recursive rejection keeps the distribution, and accepts what theory says."""

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.exact_distributions import Drawing, sparse, trees
from support.decoding.rule_checks import (
    EVERY_RULE,
    Check,
    check_exact,
    drawn_and_looked_up_siblings_mix,
    models,
    siblings_from_two_drafters_mix,
    tree,
)

from edgedec.errors import PluginError
from edgedec.sampling import Distribution
from edgedec_methods.drawn.rules import find_rule


@pytest.mark.slow
@pytest.mark.parametrize("check", [*EVERY_RULE, drawn_and_looked_up_siblings_mix, siblings_from_two_drafters_mix])
def test_the_rule_keeps_its_promises(check: Check) -> None:
    """What holds for every rule, and for those of its kind."""
    check("recursive")


@pytest.mark.slow
@pytest.mark.parametrize(("n_vocab", "branching"), [(4, [3]), (3, [2, 2]), (3, [3, 1]), (3, [1, 2]), (2, [2, 1, 1])])
def test_siblings_without_replacement_keep_the_distribution(n_vocab: int, branching: list[int]) -> None:
    """Trees of several shapes under recursive rejection."""
    target, q = models(n_vocab, n_vocab, len(branching) + 1)
    check_exact("recursive", trees(q, branching), target, n_vocab, len(branching) + 1)


def test_children_of_equal_nodes_are_draws_of_their_own() -> None:
    """A looked-up root and a drawn one may agree; their children, under one and the same q, are no siblings then."""
    target, q = models(59, 2, 3)
    root, child = sparse(q(())), sparse(q((1,)))
    drawings: list[Drawing] = []
    for a, b, c in itertools.product(range(2), repeat=3):
        weight = float(q(())[a] * q((1,))[b] * q((1,))[c])
        drawings.append((weight, tree([1, b, a, c], [-1, 0, -1, 2]), [None, child, root, child]))
    check_exact("recursive", drawings, target, 2, 3)


def test_recursive_rejection_over_all_tokens_always_accepts() -> None:
    """Where every token is drafted, one of them is the target's; where all but one are, it misses that one alone."""
    target, q = models(47, 3, 2)
    assert check_exact("recursive", trees(q, [3]), target, 3, 2) == pytest.approx(1, abs=1e-12)
    assert check_exact("recursive", trees(q, [2]), target, 3, 2) == pytest.approx(two_of(target(()), q(())), abs=1e-12)


def two_of(p: NDArray[np.float64], q: NDArray[np.float64]) -> float:
    """Return how often one of two tokens drawn without replacement is accepted, from overlaps alone."""
    total = float(np.minimum(p, q).sum())
    left = np.maximum(p - q, 0) / np.maximum(p - q, 0).sum()
    for token in np.flatnonzero(q > p):
        rest = np.where(np.arange(len(q)) == token, 0, q)
        total += float((q[token] - p[token]) * np.minimum(left, rest / rest.sum()).sum())
    return total


def test_recursive_rejection_refuses_siblings_drawn_twice() -> None:
    """Under one q a token can't be drawn again without being put back."""
    p = Distribution(np.array([4, 5]), np.array([0.5, 0.5]))
    q = Distribution(np.array([4, 6]), np.array([0.75, 0.25]))
    draft = tree([4, 4], [-1, -1])
    with pytest.raises(PluginError, match="without replacement"):
        find_rule("recursive").verify(draft, [q, q], lambda row, accepted: p, lambda k: 0.999)
