"""The sampling transform against hand-computed rows, and its random numbers against the distributions they claim."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgedec.errors import RequestError
from edgedec.sampling import Distribution, Noise, SamplingParams, choose, distribution, draw, log_probs

PLAIN = SamplingParams(temperature=1, top_p=1)
HALVES = np.log(np.array([0.5, 0.25, 0.125, 0.125])).astype(np.float32)
INF = float("inf")


def probs(
    logits: Sequence[float] | NDArray[np.float32], params: SamplingParams, seen: Sequence[int] = ()
) -> list[float]:
    """Return the whole distribution of a row."""
    row = np.array(logits, np.float32)
    return [float(p) for p in distribution(row, params, seen).dense(len(row))]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
        ({"temperature": 0.5}, [16 / 22, 4 / 22, 1 / 22, 1 / 22]),
        ({"temperature": 0}, [1, 0, 0, 0]),
        ({"top_k": 2}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_k": 3}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"top_k": 4}, [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
        ({"top_k": 99}, [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
        ({"top_p": 0.4}, [1, 0, 0, 0]),
        ({"top_p": 0.6}, [2 / 3, 1 / 3, 0, 0]),
        ({"top_p": 0.8}, [4 / 7, 2 / 7, 1 / 7, 0]),
        ({"top_p": 0.9}, [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
        ({"min_p": 0.2}, [1 / 2, 1 / 4, 1 / 8, 1 / 8]),
        ({"min_p": 0.3}, [2 / 3, 1 / 3, 0, 0]),
        ({"min_p": 1}, [1, 0, 0, 0]),
        # Top-p sees what top-k left: of (2/3, 1/3) the first alone is enough for 0.6.
        ({"top_k": 2, "top_p": 0.6}, [1, 0, 0, 0]),
        # Temperature comes last: at 1,000 all are nearly equal, yet top-p and min-p still see 1/2, 1/4, ...
        ({"temperature": 1000, "top_p": 0.6}, [0.50017, 0.49983, 0, 0]),
        ({"temperature": 1000, "min_p": 0.3}, [0.50017, 0.49983, 0, 0]),
        ({"logit_bias": {0: -INF}}, [0, 1 / 2, 1 / 4, 1 / 4]),
        ({"logit_bias": {2: float(np.log(4))}}, [4 / 11, 2 / 11, 4 / 11, 1 / 11]),
    ],
)
def test_each_option_gives_the_distribution_computed_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    """Probabilities 1/2, 1/4, 1/8, 1/8 become what the options say, in the documented order."""
    assert probs(HALVES, replace(PLAIN, **options)) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        # Seen: token 0 twice, token 1 once. A positive logit is divided, a negative one multiplied.
        ({"repetition_penalty": 2}, [1, -2, 0.5]),
        ({"frequency_penalty": 0.5}, [1, -1.5, 0.5]),
        ({"presence_penalty": 0.25}, [1.75, -1.25, 0.5]),
        ({"repetition_penalty": 2, "frequency_penalty": 0.5, "presence_penalty": 0.25}, [-0.25, -2.75, 0.5]),
        ({"repetition_penalty": 2, "penalty_last_n": 0}, [2, -1, 0.5]),
        ({"repetition_penalty": 2, "penalty_last_n": 1}, [2, -2, 0.5]),
        ({"frequency_penalty": 1, "penalty_last_n": 2}, [1, -2, 0.5]),
        ({"frequency_penalty": 1, "penalty_last_n": -1}, [0, -2, 0.5]),
        # The bias comes first: 2 - 5 is negative, and so multiplied.
        ({"repetition_penalty": 2, "logit_bias": {0: -5}}, [-6, -2, 0.5]),
    ],
)
def test_penalties_change_the_logits_as_computed_by_hand(options: dict[str, Any], expected: list[float]) -> None:
    """Logits 2, -1, 0.5 after the tokens 0, 0, 1 become what the penalties say."""
    weights = np.exp(expected)
    assert probs([2, -1, 0.5], replace(PLAIN, **options), seen=[0, 0, 1]) == pytest.approx(weights / weights.sum())


@pytest.mark.parametrize(
    ("logits", "options", "seen", "expected"),
    [
        (HALVES, {"repetition_penalty": 2}, [], pytest.approx([1 / 2, 1 / 4, 1 / 8, 1 / 8])),
        ([1, 3, 3, 2], {"temperature": 0}, [], [0, 1, 0, 0]),
        ([1, 3, 3, 2], {"temperature": 0, "frequency_penalty": 0.5}, [1], [0, 0, 1, 0]),
        ([1, 1, 1, 1], {"top_k": 2}, [], [0.5, 0.5, 0, 0]),
        ([1, 1, 1, 1], {"top_p": 0.6}, [], pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])),
        ([0, -INF, 0], {"top_k": 3}, [], [0.5, 0, 0.5]),
    ],
)
def test_of_equals_the_lowest_ids_are_kept(
    logits: Sequence[float], options: dict[str, Any], seen: list[int], expected: list[float]
) -> None:
    """At each border; without a history penalties change nothing, and what the model rules out stays out."""
    assert probs(logits, replace(PLAIN, **options), seen=seen) == expected


def test_a_distribution_holds_only_what_is_kept() -> None:
    """Of a thousand equal tokens top-p 0.6 keeps the first 600; a token that is ruled out is none of it."""
    assert distribution(np.ones(1000, np.float32), replace(PLAIN, top_p=0.6)).token_ids.tolist() == list(range(600))
    assert len(distribution(np.array([0, -INF, 0], np.float32), PLAIN).token_ids) == 2


def test_the_row_is_not_changed() -> None:
    """Bias and penalties work on a copy."""
    row = HALVES.copy()
    distribution(row, replace(PLAIN, logit_bias={0: -1}, repetition_penalty=2, top_k=2), seen=[0, 1])
    assert np.array_equal(row, HALVES)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e-30},
        {"repetition_penalty": 0.001, "frequency_penalty": 100},
        {"repetition_penalty": 1000, "frequency_penalty": -100},
        {"logit_bias": {0: 1e30, 1: -1e30}, "repetition_penalty": 1000, "temperature": 1e-30},
    ],
    ids=str,
)
def test_the_furthest_values_allowed_overflow_nowhere(options: dict[str, Any]) -> None:
    """Every option may go to its bounds, alone or with others, and the row stays one of numbers."""
    assert sum(probs([100, -100, 3, 2], replace(PLAIN, **options), seen=[0, 1, 1, 2])) == pytest.approx(1)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("row", [[-INF, -INF], [np.nan, np.nan], [INF, 0]])
def test_nothing_to_choose_from_is_refused(row: list[float], temperature: float) -> None:
    """Rows without a finite maximum raise, greedy and sampled."""
    with pytest.raises(RequestError, match="no token is left"):
        distribution(np.array(row, np.float32), replace(PLAIN, temperature=temperature))


def test_a_bias_outside_the_vocabulary_is_refused() -> None:
    """A bias for a token outside the vocabulary is refused by a message that names the token and the vocabulary."""
    with pytest.raises(RequestError, match="token 4; the vocabulary holds 0 to 3"):
        distribution(HALVES, replace(PLAIN, logit_bias={4: 1.0}))


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": -0.1},
        {"temperature": INF},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0},
        {"top_p": 1.1},
        {"min_p": -0.1},
        {"min_p": 1.1},
        {"repetition_penalty": 0},
        {"repetition_penalty": INF},
        {"frequency_penalty": 101},
        {"presence_penalty": float("nan")},
        {"penalty_last_n": -2},
        {"seed": -1},
        {"seed": 2**64},
        {"max_tokens": 0},
        {"logprobs": 101},
        {"stop": ""},
        {"stop": ("",)},
        {"logit_bias": {0: INF}},
        {"logit_bias": {0: float("nan")}},
        # Beyond these a row of float32 overflows.
        {"temperature": 1e-320},
        {"repetition_penalty": 1e-40},
        {"repetition_penalty": 1e308},
        {"logit_bias": {0: 1e308}},
        {"logit_bias": {0: -1e308}},
        # Wrong types: a limit of 2.5 tokens would never be met.
        {"max_tokens": 2.5},
        {"max_tokens": True},
        {"top_k": 1.5},
        {"penalty_last_n": 3.3},
        {"seed": 1.5},
        {"logprobs": True},
        {"temperature": "hot"},
        {"top_p": None},
        {"frequency_penalty": 1j},
        {"ignore_end": "no"},
        {"stop": 5},
        {"logit_bias": [1]},
        {"logit_bias": {"5": 1.0}},
        {"logit_bias": {5: "x"}},
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options: dict[str, Any]) -> None:
    """Every option has a type and bounds, and NaN lies outside all of them."""
    with pytest.raises(RequestError, match=next(iter(options))):
        SamplingParams(**options)


def test_log_probs_are_the_logarithms_of_the_softmax() -> None:
    """A shifted row of logarithms comes back without its shift."""
    assert log_probs(HALVES + np.float32(7), np.arange(4)) == pytest.approx(np.log([0.5, 0.25, 0.125, 0.125]), abs=1e-6)


def naive_top_p(row: NDArray[np.float32], top_p: float) -> list[int]:
    """Sort everything, then count up: what the prefilter must agree with."""
    weights = np.exp(row.astype(np.float64) - float(row.max()))
    order = sorted(range(len(row)), key=lambda i: (-weights[i], i))
    total, sums = weights.sum(), np.cumsum(weights[order])
    n_kept = next((n for n in range(1, len(order)) if sums[n - 1] >= top_p * total), len(order))
    return sorted(order[:n_kept])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(-20, 20, width=32) | st.sampled_from([0.0, 1.0]), min_size=1, max_size=60),
    st.floats(0.01, 0.999),
)
def test_the_prefilter_of_top_p_finds_the_nucleus_of_a_full_sort(row: list[float], top_p: float) -> None:
    """Rows with spreads and ties of all kinds."""
    logits = np.array(row, np.float32)
    found = distribution(logits, replace(PLAIN, top_p=top_p)).token_ids
    assert found.tolist() == naive_top_p(logits, top_p)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [0.01, 1.0, 5.0])
def test_the_prefilter_of_top_p_holds_on_large_rows(scale: float) -> None:
    """Rows of 5,000 tokens, from nearly flat to steep."""
    for seed in range(3):
        row = (np.random.default_rng(seed).standard_normal(5000) * scale).astype(np.float32)
        for top_p in (0.1, 0.5, 0.9, 0.95, 0.999):
            assert distribution(row, replace(PLAIN, top_p=top_p)).token_ids.tolist() == naive_top_p(row, top_p)


def chi_square_bound(degrees: int, alpha: float = 1e-4) -> float:
    """Return what chi-square exceeds with probability `alpha` (Wilson and Hilferty 1931)."""
    spread = 2 / (9 * degrees)
    z = NormalDist().inv_cdf(1 - alpha)
    return float(degrees * (1 - spread + z * spread**0.5) ** 3)


def chi_square(counts: NDArray[np.int64], expected: NDArray[np.float64]) -> tuple[float, float]:
    """Return the statistic and its bound; cells that can't occur must be empty."""
    possible = expected > 0
    assert not counts[~possible].any()
    off = counts[possible] - expected[possible]
    return float((off**2 / expected[possible]).sum()), chi_square_bound(int(possible.sum()) - 1)


def draws(dist: Distribution, seed: int, n: int, start: int = 0) -> NDArray[np.int64]:
    """Return the tokens drawn at n positions."""
    noise = Noise(seed)
    return np.array([choose(dist, noise, position) for position in range(start, start + n)])


@pytest.mark.slow
def test_the_chi_square_bound_is_the_tables() -> None:
    """Critical values of the printed tables, within 1 %, and a distribution that is off by a tenth is caught."""
    for degrees, alpha, value in ((5, 0.01, 15.086), (10, 0.001, 29.588), (63, 0.05, 82.529)):
        assert chi_square_bound(degrees, alpha) == pytest.approx(value, rel=0.01)
    counts = np.bincount(draws(distribution(HALVES, PLAIN), 1, 6000), minlength=4)
    statistic, bound = chi_square(counts, 6000 * np.array([0.45, 0.28, 0.135, 0.135]))
    assert statistic > bound


ROW = np.array([2.0, 1.5, 1.5, 0.3, -0.5, -1.0, -3.0, 0.0], np.float32)


def softmax(scores: Sequence[float]) -> NDArray[np.float64]:
    """Return the probabilities of logits."""
    weights = np.exp(np.array(scores, np.float64))
    total: NDArray[np.float64] = weights / weights.sum()
    return total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "scores"),
    [
        ({}, ROW),
        ({"temperature": 0.6}, ROW / 0.6),
        ({"temperature": 1.7}, ROW / 1.7),
        ({"top_k": 3}, [2, 1.5, 1.5, *[-INF] * 5]),
        # exp: 7.39, 4.48, 4.48, 1.35, 0.61, 0.37, 0.05, 1.00, in all 19.7: the first three hold 0.829.
        ({"top_p": 0.83}, [2, 1.5, 1.5, 0.3, *[-INF] * 4]),
        ({"min_p": 0.1}, [2, 1.5, 1.5, 0.3, -INF, -INF, -INF, 0]),
        ({"repetition_penalty": 1.5}, [2 / 1.5, 1.5, 1.5, 0.3, -0.75, -1, -3, 0]),
        ({"frequency_penalty": 0.4}, [1.2, 1.5, 1.5, 0.3, -0.9, -1, -3, 0]),
        ({"presence_penalty": 0.4}, [1.6, 1.5, 1.5, 0.3, -0.9, -1, -3, 0]),
        ({"logit_bias": {0: -INF, 6: 4.0}}, [-INF, 1.5, 1.5, 0.3, -0.5, -1, 1, 0]),
        (
            {"temperature": 0.8, "top_k": 5, "top_p": 0.9, "min_p": 0.05},
            np.array([2, 1.5, 1.5, 0.3] + [-INF] * 4) / 0.8,
        ),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_their_probability_says(options: dict[str, Any], scores: Sequence[float]) -> None:
    """2,500 draws under each transform pass a chi-square test against the row computed by hand."""
    dist = distribution(ROW, replace(PLAIN, **options), seen=[0, 4, 0])
    expected = softmax(scores)
    assert dist.dense(len(ROW)) == pytest.approx(expected, abs=1e-6)
    counts = np.bincount(draws(dist, 7, 2500), minlength=len(ROW))
    statistic, bound = chi_square(counts, 2500 * expected)
    assert statistic < bound


def check_independent(one: NDArray[np.int64], other: NDArray[np.int64]) -> None:
    """Check that pairs of 2,500 tokens drawn from HALVES occur as often as the product says."""
    p = np.array([0.5, 0.25, 0.125, 0.125])
    statistic, bound = chi_square(np.bincount(one * 4 + other, minlength=16), 2500 * np.outer(p, p).ravel())
    assert statistic < bound


def test_draws_at_neighbouring_positions_are_independent() -> None:
    """At positions i and i + 1."""
    tokens = draws(distribution(HALVES, PLAIN), 3, 2501)
    check_independent(tokens[:-1], tokens[1:])


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "other"), [(0, 1), (5, 5 + 2**32), (2**64 - 1, 0)])
def test_draws_under_different_seeds_are_independent(seed: int, other: int) -> None:
    """At one position under two close seeds."""
    dist = distribution(HALVES, PLAIN)
    check_independent(draws(dist, seed, 2500), draws(dist, other, 2500))


@pytest.mark.slow
@pytest.mark.parametrize("along", ["positions", "tokens", "seeds"])
def test_noise_is_uniform_along_every_axis(along: str) -> None:
    """exp(-exp(-noise)) fills 64 bins evenly along positions, token ids and seeds, and neighbours do not correlate."""
    n = 5_000
    one = np.zeros(1, np.int64)
    values: dict[str, Callable[[], NDArray[np.float64]]] = {
        "positions": lambda: np.concatenate([Noise(1).gumbel(i, one) for i in range(n)]),
        "tokens": lambda: Noise(1).gumbel(5, np.arange(n)),
        "seeds": lambda: np.concatenate([Noise(i).gumbel(5, one) for i in range(n)]),
    }
    uniform = np.exp(-np.exp(-values[along]()))
    counts = np.bincount((uniform * 64).astype(np.int64), minlength=64)
    statistic, bound = chi_square(counts, np.full(64, n / 64))
    assert statistic < bound
    assert abs(float(np.corrcoef(uniform[:-1], uniform[1:])[0, 1])) < 4 / n**0.5


@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
@pytest.mark.parametrize("options", [{}, {"top_k": 6}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 9, "top_p": 0.5}])
def test_a_token_is_drawn_as_from_the_distribution(options: dict[str, Any], temperature: float) -> None:
    """With less work: the token is the one that the noise chooses in the whole distribution."""
    params, rng = SamplingParams(**{"temperature": temperature, "top_p": 1.0} | options), np.random.default_rng(1)
    for position in range(40):
        row = rng.normal(0, 2, 60).astype(np.float32)
        assert draw(row, params, (), Noise(3), position) == choose(distribution(row, params), Noise(3), position)


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    """A token has the same noise whichever tokens are asked for with it; all of it is finite."""
    every = Noise(9).gumbel(2**31, np.arange(1000))
    some = np.array([999, 3, 500])
    assert np.array_equal(Noise(9).gumbel(2**31, some), every[some])
    assert np.isfinite(every).all()
    assert not np.array_equal(Noise(9).gumbel(2**31 + 1, np.arange(1000)), every)
    assert not np.array_equal(Noise(10).gumbel(2**31, np.arange(1000)), every)
    # Seeds and positions that differ in the same bits share none either.
    assert len({Noise(seed).key(position) for seed in range(50) for position in range(50)}) == 2500


def test_the_same_seed_draws_the_same_tokens() -> None:
    """The same seed draws the same tokens, another seed others; the position counts, not the number of draws before."""
    dist = distribution(ROW, PLAIN)
    assert np.array_equal(draws(dist, 4, 100), draws(dist, 4, 100))
    assert np.array_equal(draws(dist, 4, 100)[40:], draws(dist, 4, 60, start=40))
    assert not np.array_equal(draws(dist, 4, 100), draws(dist, 5, 100))


def test_a_token_that_stays_the_best_stays_chosen() -> None:
    """Truncation that leaves the drawn token in draws it again: the noise belongs to the token, not to its rank."""
    full = distribution(ROW, PLAIN)
    cut = distribution(ROW, replace(PLAIN, top_k=4))
    kept = set(cut.token_ids.tolist())
    pairs = list(zip(draws(full, 2, 300), draws(cut, 2, 300), strict=True))
    assert all(a == b for a, b in pairs if int(a) in kept)
    assert any(int(a) not in kept for a, _ in pairs)
