"""Particle filtering: its texts come as often as an enumeration of all its draws says, and one particle is plain."""

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise, product

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.decoding_loop import p_value
from support.decoding.table_branches import Ids, Table, letters, random_table, table_texts

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.sampling import SamplingParams
from edgedec_methods.particles import filtered, resampled, weights_of
from edgedec_methods.sampled_steps import Steps, write_steps

pytestmark = pytest.mark.slow

PARAMS = SamplingParams(temperature=1.0, top_p=1.0)
BOUND = 1e-4
SCORES = {"": 0.5, "a": 0.9, "b": 0.3, "c": 0.6, "aa": 0.2, "ab": 0.95, "ba": 0.9, "bb": 0.5, "ca": 0.1, "cb": 0.8}


def score_of(text: str) -> float:
    """Return a known score, 0.4 for texts without one."""
    return SCORES.get(text, 0.4)


def by_table(texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
    """Score texts by the table above."""
    return [score_of(texts.text(text)) for text in live]


def law_of(table: Table, ids: Ids) -> NDArray[np.float64]:
    """Return the probabilities of the next token."""
    weights: NDArray[np.float64] = np.exp(table[ids].astype(np.float64))
    law: NDArray[np.float64] = weights / weights.sum()
    return law


def outcomes_of_drawing(weights: NDArray[np.float64]) -> list[tuple[float, tuple[int, ...]]]:
    """Return every outcome of systematic resampling with its probability: the random number's range, cut up."""
    n, sums = len(weights), np.cumsum(weights)
    cuts = sorted({0.0, 1.0} | {float(n * total - i) for total in sums for i in range(n) if 0 < n * total - i < 1})
    found = []
    for low, high in pairwise(cuts):
        marks = ((low + high) / 2 + np.arange(n)) / n
        found.append((high - low, tuple(int((mark >= sums[:-1]).sum()) for mark in marks)))
    return found


def enumerated(table: Table, n: int, n_rounds: int) -> dict[Ids, float]:
    """Return how probable it is that the first of n particles ends as each text; token 0 ends a text."""
    laws: dict[tuple[Ids, ...], float] = {((),) * n: 1.0}
    for _ in range(n_rounds):
        after: dict[tuple[Ids, ...], float] = {}
        for state, p in laws.items():
            choices = [range(len(law_of(table, ids))) if 0 not in ids else [None] for ids in state]
            for tokens in product(*choices):
                grown = [ids if t is None else (*ids, t) for ids, t in zip(state, tokens, strict=True)]
                q = p
                for ids, t in zip(state, tokens, strict=True):
                    q *= 1.0 if t is None else float(law_of(table, ids)[t])
                scores = [score_of(letters([t for t in ids if t])) for ids in grown]
                for share, drawn in outcomes_of_drawing(weights_of(scores, "odds")):
                    result = tuple(grown[i] for i in drawn)
                    after[result] = after.get(result, 0.0) + q * share
        laws = after
    found: dict[Ids, float] = {}
    for state, p in laws.items():
        found[state[0]] = found.get(state[0], 0.0) + p
    assert sum(found.values()) == pytest.approx(1.0)
    return found


@pytest.mark.parametrize("n", [2, 3])
def test_the_law_of_the_particles_is_the_enumerated_one(n: int) -> None:
    """The first particle's text, over many seeds, fits the sum over all draws and all resamplings (chi-square)."""
    table = random_table(5, n_vocab=3, length=2)
    counts: Counter[Ids] = Counter()
    for run in range(2500):
        texts, branches = table_texts(table, max_tokens=2)
        with texts:
            steps = Steps(PARAMS, seed=1000 * run, separator=None, most=1)
            first = filtered(texts, n, steps, by_table).texts[0]
            counts[(*first.token_ids, 0) if first.ended == "stop" else first.token_ids] += 1
        assert not branches.held
    law = enumerated(table, n, 2)
    assert p_value(counts, law) > BOUND
    assert p_value(counts, enumerated(table, 1, 2)) < BOUND**2, "the scores change the law by far more than chance"


def test_many_particles_have_the_law_times_the_weights() -> None:
    """With 256 particles the texts' shares are near p(text) times the product of their odds, normalized."""
    table = random_table(5, n_vocab=3, length=2)
    exact: dict[Ids, float] = {}
    for first in range(3):
        for second in range(3) if first else [None]:
            ids: Ids = (first,) if second is None else (first, second)
            p = float(law_of(table, ())[first])
            p *= 1.0 if second is None else float(law_of(table, (first,))[second])
            odds = [s / (1 - s) for s in (score_of(letters([t for t in ids[: i + 1] if t])) for i in range(2))]
            exact[ids] = p * odds[0] * odds[1]  # an ended text keeps its score in the second round
    total = sum(exact.values())
    shares: Counter[Ids] = Counter()
    for run in range(20):
        texts, _ = table_texts(table, max_tokens=2)
        with texts:
            for text in filtered(texts, 256, Steps(PARAMS, seed=10**6 * run, separator=None, most=1), by_table).texts:
                shares[(*text.token_ids, 0) if text.ended == "stop" else text.token_ids] += 1
    for ids, weight in exact.items():
        assert shares[ids] / (20 * 256) == pytest.approx(weight / total, abs=0.02)


@pytest.mark.parametrize("seed", range(20))
def test_one_particle_is_the_plain_text(seed: int) -> None:
    """Whatever the scores, one particle writes what its seed writes alone, step by step or at once."""
    table = random_table(2, n_vocab=4, length=5)
    plain, single = table_texts(table, max_tokens=5)[0], table_texts(table, max_tokens=5)[0]
    with plain, single:
        (text,) = write_steps(plain, [plain.begin()], PARAMS, [seed], separator=None)
        found = filtered(single, 1, Steps(PARAMS, seed=seed, separator="a", most=2), by_table)
        assert found.best.token_ids == text.token_ids
        assert found.best.logprob == text.logprob


def test_drawing_takes_each_place_about_as_often_as_it_weighs() -> None:
    """Systematic resampling: floor(n w) draws or one more, in order; a weight of 0 is never drawn."""
    rng = np.random.default_rng(0)
    for _ in range(300):
        weights = rng.dirichlet(np.full(7, 0.4))
        weights[2] = 0.0
        weights /= weights.sum()
        drawn = resampled(weights, rng)
        assert drawn == sorted(drawn)
        for i, weight in enumerate(weights):
            assert np.floor(7 * weight - 1e-9) <= drawn.count(i) <= np.ceil(7 * weight + 1e-9)
