"""The rules as a decoder calls them: keyed random numbers, greedy targets, the rows they ask for, what they refuse."""

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.exact_distributions import mixed_law, outcomes, random_law, sparse, text_of

from edgedec.draft import EMPTY_DRAFT, Draft, Verification
from edgedec.errors import PluginError
from edgedec.noise import Noise
from edgedec.sampling import Distribution
from edgedec.verification import RULES, uniform_source

RNG = np.random.default_rng(0)
TARGET = random_law(RNG, 3, 3)
DRAFTER = mixed_law(TARGET, random_law(RNG, 3, 3), 0.5)


def tree(tokens: Sequence[int], parents: Sequence[int]) -> Draft:
    """Return a draft from its nodes."""
    return Draft.tree(tokens, parents, [1.0] * len(tokens))


def drawn_from(draft: Draft) -> list[Distribution]:
    """Return q as the drafter has it at each node, one object for siblings."""
    laws = {parent: sparse(DRAFTER(text_of(draft, parent))) for parent in set(draft.parents)}
    return [laws[parent] for parent in list(draft.parents)]


def verify(name: str, draft: Draft, seed: int) -> Verification:
    """Run a rule with the random numbers of a step at position 100."""
    uniform = uniform_source(Noise(seed), 100)
    return RULES[name](draft, drawn_from(draft), lambda row, accepted: sparse(TARGET(accepted)), uniform)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_sampled_outcomes_fit_the_exact_ones(name: str) -> None:
    """Over 4,000 seeds, each outcome of one draft comes as often as its probability says (chi-square)."""
    draft = Draft.chain([0, 2]) if name in ("tokenwise", "block") else tree([0, 2, 1, 1], [-1, 0, -1, 2])
    expected: Counter[Verification] = Counter()
    for weight, verification in outcomes(RULES[name], draft, drawn_from(draft), TARGET):
        expected[verification] += weight  # type: ignore[assignment]  # a Counter adds floats as well
    n = 4000
    found = Counter(verify(name, draft, seed) for seed in range(n))
    assert set(found) <= set(expected)
    likely = [outcome for outcome, weight in expected.items() if weight * n >= 5]
    assert len(likely) >= 4
    chi_square = sum((found[outcome] - n * expected[outcome]) ** 2 / (n * expected[outcome]) for outcome in likely)
    freedom = len(likely) - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("name", RULES)
def test_the_outcome_is_a_function_of_seed_and_position(name: str) -> None:
    """Twice the same, and not the same for all seeds."""
    draft = Draft.chain([0, 2])
    first = [verify(name, draft, seed) for seed in range(20)]
    assert first == [verify(name, draft, seed) for seed in range(20)]
    assert len(set(first)) > 1


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    """Draw trees over three token ids, so that many nodes are right by chance."""
    tokens = draw(st.lists(st.integers(0, 2), max_size=10))
    return tree(tokens, [draw(st.integers(-1, i - 1)) for i in range(len(tokens))])


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
@given(drafts(), st.lists(st.integers(0, 2), min_size=11, max_size=11))
def test_a_greedy_target_says_its_text_under_any_looked_up_draft(name: str, draft: Draft, text: list[int]) -> None:
    """At temperature 0 every rule is the longest match, whatever the seed."""
    verification = RULES[name](
        draft,
        [None] * len(draft),
        lambda row, accepted: Distribution(np.array([text[len(accepted)]]), np.ones(1)),
        uniform_source(Noise(len(draft)), 0),
    )
    drafted = {text_of(draft, node) for node in range(-1, len(draft))}
    n_match = max(n for n in range(11) if tuple(text[:n]) in drafted)
    assert verification.token_ids == tuple(text[: n_match + 1])
    assert text_of(draft, verification.path[-1] if verification.path else -1) == tuple(text[:n_match])


@pytest.mark.parametrize("name", ["kseq", "multipath"])
def test_a_greedy_target_finds_its_path_among_drawn_ones(name: str) -> None:
    """Of three paths the third is right to its end, and the others are not looked at beyond their first token."""
    draft = tree([0, 0, 1, 2, 1, 0], [-1, 0, -1, 2, -1, 4])
    rows: list[int] = []

    def target(row: int, accepted: tuple[int, ...]) -> Distribution:
        rows.append(row)
        return Distribution(np.array([(1, 0, 2)[len(accepted)]]), np.ones(1))

    verification = RULES[name](draft, drawn_from(draft), target, uniform_source(Noise(3), 0))
    assert verification == Verification((4, 5), (1, 0, 2))
    assert rows in ([0, 3, 6], [0, 5, 6])


@pytest.mark.parametrize("name", RULES)
def test_rows_after_a_token_that_the_target_rules_out_are_not_asked_for(name: str) -> None:
    """One row suffices to reject the first of three tokens."""
    rows: list[int] = []

    def target(row: int, accepted: tuple[int, ...]) -> Distribution:
        rows.append(row)
        return Distribution(np.array([7]), np.ones(1))

    assert RULES[name](Draft.chain([5, 7, 7]), [None] * 3, target, lambda k: 0.5) == Verification((), (7,))
    assert rows == [0]


@pytest.mark.parametrize("name", RULES)
def test_an_empty_draft_is_a_plain_draw(name: str) -> None:
    """One row, one number: the token at which the running sum of p passes it."""
    p = Distribution(np.array([4, 6, 9]), np.array([0.25, 0.5, 0.25]))
    for number, token in [(0.2, 4), (0.3, 6), (0.7, 6), (0.8, 9), (1 - 2**-53, 9)]:
        numbers = {0: number}
        assert RULES[name](EMPTY_DRAFT, [], lambda row, accepted: p, numbers.__getitem__) == Verification((), (token,))


@pytest.mark.parametrize("name", RULES)
def test_a_q_that_does_not_fit_the_draft_is_refused(name: str) -> None:
    """One entry a node, and none that rules the node's token out."""
    p = Distribution(np.array([4]), np.ones(1))
    for q in ([], [p, None]):
        with pytest.raises(PluginError, match="must have one for each node"):
            RULES[name](Draft.chain([4]), q, lambda row, accepted: p, lambda k: 0.5)
    with pytest.raises(PluginError, match="probability 0"):
        RULES[name](Draft.chain([5]), [p], lambda row, accepted: p, lambda k: 0.5)


def test_recursive_rejection_refuses_siblings_drawn_twice() -> None:
    """Under one q a token can't be drawn again without being put back; K-SEQ takes it for the second draw it is."""
    p = Distribution(np.array([4, 5]), np.array([0.5, 0.5]))
    q = Distribution(np.array([4, 6]), np.array([0.75, 0.25]))
    draft = tree([4, 4], [-1, -1])
    with pytest.raises(PluginError, match="without replacement"):
        RULES["recursive"](draft, [q, q], lambda row, accepted: p, lambda k: 0.999)
    assert RULES["kseq"](draft, [q, q], lambda row, accepted: p, lambda k: 0.999) == Verification((), (5,))


def test_the_random_numbers_are_uniform_keyed_and_apart_from_the_noise() -> None:
    """Ten cells hold 20,000 numbers evenly; seed, position and count matter; the Gumbel noise is another."""
    numbers = np.array([uniform_source(Noise(5), position)(k) for position in range(2000) for k in range(10)])
    assert len(set(numbers.tolist())) == 20_000
    assert 0 < numbers.min() < numbers.max() < 1
    counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < 9 + 4 * np.sqrt(18)
    by_position = numbers.reshape(2000, 10)
    assert np.abs(np.corrcoef(by_position.T) - np.eye(10)).max() < 4 / np.sqrt(2000)
    noise = np.array([Noise(5).gumbel(position, np.arange(10)) for position in range(2000)])
    assert np.abs(np.corrcoef(by_position.ravel(), np.exp(-np.exp(-noise)).ravel())[0, 1]) < 4 / np.sqrt(20_000)
    assert uniform_source(Noise(6), 0)(0) != uniform_source(Noise(5), 0)(0)
