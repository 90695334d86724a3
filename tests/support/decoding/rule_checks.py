"""What every verification rule must do: exact sums over all drafts, and how a decoder calls it; a check a function.

A check takes the name of a rule. Those of a tuple of checks hold for the rules that the tuple's name says.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.errors import PluginError
from edgedec.sampling import Distribution, Noise
from edgedec_methods.drawn.rule_tools import uniform_source
from edgedec_methods.drawn.rules import find_rule
from support.decoding.exact_distributions import (
    Drawing,
    Law,
    integrate,
    joint_of,
    mixed_law,
    outcomes,
    paths,
    random_law,
    sparse,
    text_of,
    trees,
)

Check = Callable[[str], None]

_RNG = np.random.default_rng(0)
TARGET = random_law(_RNG, 3, 3)
DRAFTER = mixed_law(TARGET, random_law(_RNG, 3, 3), 0.5)


def models(seed: int, n_vocab: int, length: int, share: float = 0.6) -> tuple[Law, Law]:
    """Return a target and a drafter that differs from it by this share."""
    rng = np.random.default_rng(seed)
    target = random_law(rng, n_vocab, length)
    return target, mixed_law(target, random_law(rng, n_vocab, length), share)


def check_exact(name: str, drawings: Sequence[Drawing], target: Law, n_vocab: int, length: int) -> float:
    """Check that the text is distributed as the target's; return how many tokens are accepted on average."""
    result = integrate(find_rule(name).verify, drawings, target, n_vocab, length)
    assert np.abs(result.joint - joint_of(target, n_vocab, length)).max() < 1e-12
    return result.n_accepted


def tree(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """Return a draft from its nodes."""
    return Draft.tree(tokens, parents, [1.0] * len(tokens))


def drawn_from(draft: Draft) -> list[Distribution]:
    """Return q as the drafter has it at each node, one object for siblings."""
    laws = {parent: sparse(DRAFTER(text_of(draft, parent))) for parent in set(draft.parents)}
    return [laws[parent] for parent in list(draft.parents)]


def verified(name: str, draft: Draft, seed: int) -> Verification:
    """Run a rule with the random numbers of a step at position 100."""
    uniform = uniform_source(Noise(seed), 100)
    return find_rule(name).verify(draft, drawn_from(draft), lambda row, accepted: sparse(TARGET(accepted)), uniform)


def n_paths(name: str) -> int:
    """Return how many paths the rule's drafts may have side by side, independently drawn: two, or one."""
    return 2 if find_rule(name).siblings == "independent" else 1


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


def a_drawn_chain_keeps_the_distribution(name: str) -> None:
    """A chain is what every rule can take."""
    for n_vocab, depth in [(2, 3), (3, 3), (4, 2)]:
        target, q = models(depth, n_vocab, depth + 1)
        check_exact(name, paths(q, n_vocab, depth, 1), target, n_vocab, depth + 1)


def nodes_that_were_looked_up_keep_the_distribution(name: str) -> None:
    """No chance in the draft: no rule needs a q."""
    for draft in (
        EMPTY_DRAFT,
        Draft.chain([2, 0, 1]),
        tree([2, 0, 1], [-1, -1, -1]),
        tree([2, 0, 1, 0, 0], [-1, 0, 0, -1, 3]),
        tree([2, 2, 0, 1, 1], [-1, -1, 0, 1, 0]),
    ):
        target, _ = models(7, 3, 4)
        check_exact(name, [(1.0, draft, [None] * len(draft))], target, 3, 4)


def drawn_and_looked_up_nodes_mix_in_a_chain(name: str) -> None:
    """Of the three nodes, the second is a function of the first."""
    target, q = models(11, 3, 4)
    drawings: list[Drawing] = []
    for first, third in itertools.product(range(3), repeat=2):
        tokens = (first, 2 - first, third)
        weight = float(q(())[first] * q(tokens[:2])[third])
        drawings.append((weight, Draft.chain(tokens), [sparse(q(())), None, sparse(q(tokens[:2]))]))
    check_exact(name, drawings, target, 3, 4)


def where_a_path_ends_may_depend_on_its_tokens(name: str) -> None:
    """A drafter that stops after token 0 biases nothing."""
    target, q = models(29, 3, 3)
    drawings: list[Drawing] = []
    for weight, draft, laws in paths(q, 3, 2, n_paths(name)):
        kept = [node for node, parent in enumerate(draft.parents) if parent < 0 or draft.tokens[parent] != 0]
        place = {-1: -1} | {node: i for i, node in enumerate(kept)}
        shorter = tree([draft.tokens[node] for node in kept], [place[int(draft.parents[node])] for node in kept])
        drawings.append((weight, shorter, [laws[node] for node in kept]))
    check_exact(name, drawings, target, 3, 3)


def supports_that_differ_keep_the_distribution(name: str) -> None:
    """p and q share one token of three, and p rules out what q holds most."""
    p, q = np.array([0.25, 0.75, 0.0]), np.array([0.0, 0.25, 0.75])
    check_exact(name, paths(lambda text: q, 3, 2, n_paths(name)), lambda text: p, 3, 3)


def nothing_is_accepted_where_the_supports_are_disjoint(name: str) -> None:
    """Each draft is wrong, and the target's token is drawn as without one."""
    p, q = np.array([0.25, 0.75, 0.0, 0.0]), np.array([0.0, 0.0, 0.5, 0.5])
    assert check_exact(name, paths(lambda text: q, 4, 2, n_paths(name)), lambda text: p, 4, 3) == 0


def a_drafter_that_is_the_target_has_everything_accepted(name: str) -> None:
    """With q equal to p all tokens of a path stand; halving leaves K-SEQ a billionth short."""
    target, _ = models(37, 2, 3)
    n_accepted = check_exact(name, paths(target, 2, 2, n_paths(name)), target, 2, 3)
    assert n_accepted == pytest.approx(2, abs=1e-8)


def sampled_outcomes_fit_the_exact_ones(name: str) -> None:
    """Over 4,000 seeds, each outcome of one draft comes as often as its probability says (chi-square)."""
    rule = find_rule(name)
    draft = Draft.chain([0, 2]) if rule.siblings is None else tree([0, 2, 1, 1], [-1, 0, -1, 2])
    expected: Counter[Verification] = Counter()
    for weight, verification in outcomes(rule.verify, draft, drawn_from(draft), TARGET):
        expected[verification] += weight  # type: ignore[assignment]  # a Counter adds floats as well
    n = 4000
    found = Counter(verified(name, draft, seed) for seed in range(n))
    assert set(found) <= set(expected)
    likely = [outcome for outcome, weight in expected.items() if weight * n >= 5]
    assert len(likely) >= 4
    chi_square = sum((found[outcome] - n * expected[outcome]) ** 2 / (n * expected[outcome]) for outcome in likely)
    freedom = len(likely) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


def the_outcome_is_a_function_of_seed_and_position(name: str) -> None:
    """Twice the same, and not the same for all seeds."""
    draft = Draft.chain([0, 2])
    first = [verified(name, draft, seed) for seed in range(20)]
    assert first == [verified(name, draft, seed) for seed in range(20)]
    assert len(set(first)) > 1


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Draw trees over three token ids, so that many nodes are right by chance."""
    tokens = draw(st.lists(st.integers(0, 2), max_size=10))
    return tree(tokens, [draw(st.integers(-1, i - 1)) for i in range(len(tokens))])


@given(drafts(), st.lists(st.integers(0, 2), min_size=11, max_size=11))
def a_greedy_target_says_its_text_under_any_looked_up_draft(name: str, draft: Draft, text: list[int]) -> None:
    """At temperature 0 every rule is the longest match, whatever the seed."""
    verification = find_rule(name).verify(
        draft,
        [None] * len(draft),
        lambda row, accepted: Distribution(np.array([text[len(accepted)]]), np.ones(1)),
        uniform_source(Noise(len(draft)), 0),
    )
    drafted = {text_of(draft, node) for node in range(-1, len(draft))}
    n_match = max(n for n in range(11) if tuple(text[:n]) in drafted)
    assert verification.token_ids == tuple(text[: n_match + 1])
    assert text_of(draft, verification.path[-1] if verification.path else -1) == tuple(text[:n_match])


def rows_after_a_token_that_the_target_rules_out_are_not_asked_for(name: str) -> None:
    """One row suffices to reject the first of three tokens."""
    rows: list[int] = []

    def target(row: int, accepted: tuple[int, ...]) -> Distribution:
        rows.append(row)
        return Distribution(np.array([7]), np.ones(1))

    found = find_rule(name).verify(Draft.chain([5, 7, 7]), [None] * 3, target, lambda k: 0.5)
    assert found == Verification((), (7,))
    assert rows == [0]


def an_empty_draft_is_a_plain_draw(name: str) -> None:
    """One row, one number: the token at which the running sum of p passes it."""
    p = Distribution(np.array([4, 6, 9]), np.array([0.25, 0.5, 0.25]))
    for number, token in [(0.2, 4), (0.3, 6), (0.7, 6), (0.8, 9), (1 - 2**-53, 9)]:
        numbers = {0: number}
        found = find_rule(name).verify(EMPTY_DRAFT, [], lambda row, accepted: p, numbers.__getitem__)
        assert found == Verification((), (token,))


def a_q_that_does_not_fit_the_draft_is_refused(name: str) -> None:
    """One entry a node, and none that rules the node's token out."""
    p, verify = Distribution(np.array([4]), np.ones(1)), find_rule(name).verify
    for q in ([], [p, None]):
        with pytest.raises(PluginError, match="must have one for each node"):
            verify(Draft.chain([4]), q, lambda row, accepted: p, lambda k: 0.5)
    with pytest.raises(PluginError, match="probability 0"):
        verify(Draft.chain([5]), [p], lambda row, accepted: p, lambda k: 0.5)


EVERY_RULE: tuple[Check, ...] = (
    a_drawn_chain_keeps_the_distribution,
    nodes_that_were_looked_up_keep_the_distribution,
    drawn_and_looked_up_nodes_mix_in_a_chain,
    where_a_path_ends_may_depend_on_its_tokens,
    supports_that_differ_keep_the_distribution,
    nothing_is_accepted_where_the_supports_are_disjoint,
    a_drafter_that_is_the_target_has_everything_accepted,
    sampled_outcomes_fit_the_exact_ones,
    the_outcome_is_a_function_of_seed_and_position,
    a_greedy_target_says_its_text_under_any_looked_up_draft,
    rows_after_a_token_that_the_target_rules_out_are_not_asked_for,
    an_empty_draft_is_a_plain_draw,
    a_q_that_does_not_fit_the_draft_is_refused,
)


def a_tree_goes_to_recursive_rejection(name: str) -> None:
    """The chain rules take trees, too, and accept what the recursive rule does."""
    target, q = models(5, 3, 3)
    drawings = trees(q, [2, 1])
    assert check_exact(name, drawings, target, 3, 3) == check_exact("recursive", drawings, target, 3, 3)


def drawn_and_looked_up_siblings_mix(name: str) -> None:
    """A looked-up root with a child, before and after two roots drawn without replacement."""
    target, q = models(13, 3, 3)
    drawings: list[Drawing] = []
    for weight, draft, laws in trees(q, [2]):
        a, b = list(draft.tokens)
        before = tree([1, 0, a, b], [-1, 0, -1, -1])
        after = tree([a, b, 1, 0], [-1, -1, -1, 2])
        drawings += [(weight / 2, before, [None, None, *laws]), (weight / 2, after, [*laws, None, None])]
    check_exact(name, drawings, target, 3, 3)


RULES_OF_CHAINS: tuple[Check, ...] = (a_tree_goes_to_recursive_rejection, drawn_and_looked_up_siblings_mix)


def siblings_from_two_drafters_mix(name: str) -> None:
    """Each root was drawn from a distribution of its own."""
    target, first = models(19, 3, 2)
    _, second = models(23, 3, 2)
    laws = [sparse(first(())), sparse(second(()))]
    drawings: list[Drawing] = [
        (float(first(())[a] * second(())[b]), tree([a, b], [-1, -1]), laws) for a in range(3) for b in range(3)
    ]
    check_exact(name, drawings, target, 3, 2)


def independent_paths_keep_the_distribution(name: str) -> None:
    """Paths side by side, whether they agree or not."""
    for n_vocab, depth, k in [(4, 1, 2), (3, 2, 2), (2, 3, 2), (3, 1, 3), (2, 2, 3)]:
        target, q = models(k, n_vocab, depth + 1)
        check_exact(name, paths(q, n_vocab, depth, k), target, n_vocab, depth + 1)


def drawn_paths_and_a_looked_up_one_mix(name: str) -> None:
    """Two drawn paths and one that was found somewhere."""
    target, q = models(17, 2, 3)
    drawings = [
        (weight, tree([*list(draft.tokens), 1, 0], [*list(draft.parents), -1, 4]), [*laws, None, None])
        for weight, draft, laws in paths(q, 2, 2, 2)
    ]
    check_exact(name, drawings, target, 2, 3)


def paths_may_be_cut_at_any_node(name: str) -> None:
    """The second path lacks its last node, as in a draft that was truncated."""
    target, q = models(31, 2, 3)
    drawings = [(weight, draft.truncated(3), laws[:3]) for weight, draft, laws in paths(q, 2, 2, 2)]
    check_exact(name, drawings, target, 2, 3)


def a_greedy_target_finds_its_path_among_drawn_ones(name: str) -> None:
    """Of three paths the third is right to its end, and the others are not looked at beyond their first token."""
    draft = tree([0, 0, 1, 2, 1, 0], [-1, 0, -1, 2, -1, 4])
    rows: list[int] = []

    def target(row: int, accepted: tuple[int, ...]) -> Distribution:
        rows.append(row)
        return Distribution(np.array([(1, 0, 2)[len(accepted)]]), np.ones(1))

    verification = find_rule(name).verify(draft, drawn_from(draft), target, uniform_source(Noise(3), 0))
    assert verification == Verification((4, 5), (1, 0, 2))
    assert rows in ([0, 3, 6], [0, 5, 6])


RULES_OF_PATHS: tuple[Check, ...] = (
    siblings_from_two_drafters_mix,
    independent_paths_keep_the_distribution,
    drawn_paths_and_a_looked_up_one_mix,
    paths_may_be_cut_at_any_node,
    a_greedy_target_finds_its_path_among_drawn_ones,
)
