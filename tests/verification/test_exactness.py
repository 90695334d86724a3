"""Every rule keeps the target's distribution, and accepts what theory says: exact sums over all drafts, no samples."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray
from support.exact_distributions import (
    Drawing,
    Law,
    integrate,
    joint_of,
    mixed_law,
    paths,
    random_law,
    sparse,
    trees,
)

from edgedec.draft import EMPTY_DRAFT, Draft
from edgedec.sampling import Distribution
from edgedec.verification import RULES

CHAIN_RULES = ("tokenwise", "block", "recursive", "kseq", "multipath")
PATH_RULES = ("kseq", "multipath")


def models(seed: int, n_vocab: int, length: int, share: float = 0.6) -> tuple[Law, Law]:
    """Return a target and a drafter that differs from it by this share."""
    rng = np.random.default_rng(seed)
    target = random_law(rng, n_vocab, length)
    return target, mixed_law(target, random_law(rng, n_vocab, length), share)


def check_exact(name: str, drawings: Sequence[Drawing], target: Law, n_vocab: int, length: int) -> float:
    """Check that the text is distributed as the target's; return how many tokens are accepted on average."""
    result = integrate(RULES[name], drawings, target, n_vocab, length)
    assert np.abs(result.joint - joint_of(target, n_vocab, length)).max() < 1e-12
    return result.n_accepted


def tree(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """Return a draft from its nodes."""
    return Draft.tree(tokens, parents, [1.0] * len(tokens))


@pytest.mark.parametrize("name", CHAIN_RULES)
@pytest.mark.parametrize(("n_vocab", "depth"), [(2, 3), (3, 3), (4, 2)])
def test_a_drawn_chain_keeps_the_distribution(name: str, n_vocab: int, depth: int) -> None:
    """A chain is what every rule can take."""
    target, q = models(depth, n_vocab, depth + 1)
    check_exact(name, paths(q, n_vocab, depth, 1), target, n_vocab, depth + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PATH_RULES)
@pytest.mark.parametrize(("n_vocab", "depth", "k"), [(4, 1, 2), (3, 2, 2), (2, 3, 2), (3, 1, 3), (2, 2, 3)])
def test_independent_paths_keep_the_distribution(name: str, n_vocab: int, depth: int, k: int) -> None:
    """Paths side by side, whether they agree or not."""
    target, q = models(k, n_vocab, depth + 1)
    check_exact(name, paths(q, n_vocab, depth, k), target, n_vocab, depth + 1)


@pytest.mark.slow
@pytest.mark.parametrize(("n_vocab", "branching"), [(4, [3]), (3, [2, 2]), (3, [3, 1]), (3, [1, 2]), (2, [2, 1, 1])])
def test_siblings_without_replacement_keep_the_distribution(n_vocab: int, branching: list[int]) -> None:
    """Trees of several shapes under recursive rejection."""
    target, q = models(n_vocab, n_vocab, len(branching) + 1)
    check_exact("recursive", trees(q, branching), target, n_vocab, len(branching) + 1)


@pytest.mark.parametrize("name", ["tokenwise", "block"])
def test_a_tree_goes_to_recursive_rejection(name: str) -> None:
    """The chain rules take trees, too, and accept what the recursive rule does."""
    target, q = models(5, 3, 3)
    drawings = trees(q, [2, 1])
    assert check_exact(name, drawings, target, 3, 3) == check_exact("recursive", drawings, target, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(
    "draft",
    [
        EMPTY_DRAFT,
        Draft.chain([2, 0, 1]),
        tree([2, 0, 1], [-1, -1, -1]),
        tree([2, 0, 1, 0, 0], [-1, 0, 0, -1, 3]),
        tree([2, 2, 0, 1, 1], [-1, -1, 0, 1, 0]),
    ],
    ids=["empty", "chain", "all tokens", "tree", "equal siblings"],
)
def test_nodes_that_were_looked_up_keep_the_distribution(name: str, draft: Draft) -> None:
    """No chance in the draft: no rule needs a q."""
    target, _ = models(7, 3, 4)
    check_exact(name, [(1.0, draft, [None] * len(draft))], target, 3, 4)


@pytest.mark.parametrize("name", CHAIN_RULES)
def test_drawn_and_looked_up_nodes_mix_in_a_chain(name: str) -> None:
    """Of the three nodes, the second is a function of the first."""
    target, q = models(11, 3, 4)
    drawings: list[Drawing] = []
    for first, third in itertools.product(range(3), repeat=2):
        tokens = (first, 2 - first, third)
        weight = float(q(())[first] * q(tokens[:2])[third])
        drawings.append((weight, Draft.chain(tokens), [sparse(q(())), None, sparse(q(tokens[:2]))]))
    check_exact(name, drawings, target, 3, 4)


@pytest.mark.parametrize("name", ["recursive", "tokenwise", "block"])
def test_drawn_and_looked_up_siblings_mix(name: str) -> None:
    """A looked-up root with a child, before and after two roots drawn without replacement."""
    target, q = models(13, 3, 3)
    drawings: list[Drawing] = []
    for weight, draft, laws in trees(q, [2]):
        a, b = list(draft.tokens)
        before = tree([1, 0, a, b], [-1, 0, -1, -1])
        after = tree([a, b, 1, 0], [-1, -1, -1, 2])
        drawings += [(weight / 2, before, [None, None, *laws]), (weight / 2, after, [*laws, None, None])]
    check_exact(name, drawings, target, 3, 3)


@pytest.mark.parametrize("name", PATH_RULES)
def test_drawn_paths_and_a_looked_up_one_mix(name: str) -> None:
    """Two drawn paths and one that was found somewhere."""
    target, q = models(17, 2, 3)
    drawings = [
        (weight, tree([*list(draft.tokens), 1, 0], [*list(draft.parents), -1, 4]), [*laws, None, None])
        for weight, draft, laws in paths(q, 2, 2, 2)
    ]
    check_exact(name, drawings, target, 2, 3)


def test_children_of_equal_nodes_are_draws_of_their_own() -> None:
    """A looked-up root and a drawn one may agree; their children, under one and the same q, are no siblings then."""
    target, q = models(59, 2, 3)
    root, child = sparse(q(())), sparse(q((1,)))
    drawings: list[Drawing] = []
    for a, b, c in itertools.product(range(2), repeat=3):
        weight = float(q(())[a] * q((1,))[b] * q((1,))[c])
        drawings.append((weight, tree([1, b, a, c], [-1, 0, -1, 2]), [None, child, root, child]))
    check_exact("recursive", drawings, target, 2, 3)


@pytest.mark.parametrize("name", ["recursive", "kseq", "multipath"])
def test_siblings_from_two_drafters_mix(name: str) -> None:
    """Each root was drawn from a distribution of its own."""
    target, first = models(19, 3, 2)
    _, second = models(23, 3, 2)
    laws = [sparse(first(())), sparse(second(()))]
    drawings: list[Drawing] = [
        (float(first(())[a] * second(())[b]), tree([a, b], [-1, -1]), laws) for a in range(3) for b in range(3)
    ]
    check_exact(name, drawings, target, 3, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_where_a_path_ends_may_depend_on_its_tokens(name: str) -> None:
    """A drafter that stops after token 0 biases nothing."""
    target, q = models(29, 3, 3)
    drawings: list[Drawing] = []
    for weight, draft, laws in paths(q, 3, 2, 1 if name in ("tokenwise", "block", "recursive") else 2):
        kept = [node for node, parent in enumerate(draft.parents) if parent < 0 or draft.tokens[parent] != 0]
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        shorter = tree([draft.tokens[node] for node in kept], [place[int(draft.parents[node])] for node in kept])
        drawings.append((weight, shorter, [laws[node] for node in kept]))
    check_exact(name, drawings, target, 3, 3)


@pytest.mark.parametrize("name", PATH_RULES)
def test_paths_may_be_cut_at_any_node(name: str) -> None:
    """The second path lacks its last node, as in a draft that was truncated."""
    target, q = models(31, 2, 3)
    drawings = [(weight, draft.truncated(3), laws[:3]) for weight, draft, laws in paths(q, 2, 2, 2)]
    check_exact(name, drawings, target, 2, 3)


@pytest.mark.parametrize("name", RULES)
def test_supports_that_differ_keep_the_distribution(name: str) -> None:
    """p and q share one token of three, and p rules out what q holds most."""
    p, q = np.array([0.25, 0.75, 0.0]), np.array([0.0, 0.25, 0.75])
    k = 2 if name in PATH_RULES else 1
    check_exact(name, paths(lambda text: q, 3, 2, k), lambda text: p, 3, 3)


@pytest.mark.parametrize("name", RULES)
def test_nothing_is_accepted_where_the_supports_are_disjoint(name: str) -> None:
    """Each draft is wrong, and the target's token is drawn as without one."""
    p, q = np.array([0.25, 0.75, 0.0, 0.0]), np.array([0.0, 0.0, 0.5, 0.5])
    k = 2 if name in PATH_RULES else 1
    assert check_exact(name, paths(lambda text: q, 4, 2, k), lambda text: p, 4, 3) == 0


@pytest.mark.parametrize("name", RULES)
def test_a_drafter_that_is_the_target_has_everything_accepted(name: str) -> None:
    """With q equal to p all tokens of a path stand; halving leaves K-SEQ a billionth short."""
    target, _ = models(37, 2, 3)
    k = 2 if name in PATH_RULES else 1
    n_accepted = check_exact(name, paths(target, 2, 2, k), target, 2, 3)
    assert n_accepted == pytest.approx(2, abs=1e-8)


def test_tokenwise_accepts_the_product_of_ratios() -> None:
    """The expected length is the sum over depths of the product of min(1, p / q), averaged over q."""
    target, q = models(41, 3, 4)
    expected = 0.0
    for depth in (1, 2, 3):
        for text, drawn in np.ndenumerate(joint_of(q, 3, depth)):
            ratios = [target(text[:i])[text[i]] / q(text[:i])[text[i]] for i in range(depth)]
            expected += drawn * np.prod(np.minimum(1, ratios))
    n_accepted = integrate(RULES["tokenwise"], paths(q, 3, 3, 1), target, 3, 4).n_accepted
    assert n_accepted == pytest.approx(expected, abs=1e-12)


def block_length(target: Law, q: Law, n_vocab: int, depth: int) -> float:
    """Return the expected length by theorem: a part of the draft stands with its weight, however the rest looks."""
    total = 0.0
    for length in range(1, depth + 1):
        for text, drawn in np.ndenumerate(joint_of(q, n_vocab, length)):
            weight = 1.0
            for i in range(length):
                weight = min(1.0, float(weight * target(text[:i])[text[i]] / q(text[:i])[text[i]]))
            total += drawn * weight
    return total


@pytest.mark.parametrize("seed", range(8))
def test_block_accepts_its_weights_and_never_less_than_tokenwise(seed: int) -> None:
    """On random models, near to each other and far apart."""
    target, q = models(seed, 3, 4, share=(seed + 1) / 8)
    drawings = paths(q, 3, 3, 1)
    block = integrate(RULES["block"], drawings, target, 3, 4).n_accepted
    assert block == pytest.approx(block_length(target, q, 3, 3), abs=1e-12)
    assert block >= integrate(RULES["tokenwise"], drawings, target, 3, 4).n_accepted


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_choosing_among_paths_accepts_more_than_one_path(seed: int) -> None:
    """On these models; that it is so on all of them is not proven."""
    target, q = models(seed, 3, 3, share=(seed + 1) / 6)
    assert integrate(RULES["multipath"], paths(q, 3, 2, 2), target, 3, 3).n_accepted > block_length(target, q, 3, 2)


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


def test_the_same_tokens_under_one_q_are_two_draws_for_kseq() -> None:
    """A point mass as a q is what None is."""
    target, _ = models(53, 3, 2)
    mass = Distribution(np.array([1]), np.ones(1))
    draft = tree([1, 1], [-1, -1])
    given = check_exact("kseq", [(1.0, draft, [mass, mass])], target, 3, 2)
    assert given == check_exact("kseq", [(1.0, draft, [None, None])], target, 3, 2)
    assert given == pytest.approx(target(())[1], abs=1e-12)
