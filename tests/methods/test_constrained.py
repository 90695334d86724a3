"""Constrained texts and particles: weights in expectation, the enumerated law, and the texts of masks."""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.decoding.decoding_loop import p_value
from support.decoding.table_branches import END, Ids, Table, letters, log_law, random_table, table_texts
from support.decoding.table_language import LanguageState, divergence, kept_law

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.constraint import Constraint, DrawPlace
from edgedec.errors import DeadEndError, OptionError
from edgedec.sampling import Noise, SamplingParams
from edgedec_methods.constrained import Weighted, constrained
from edgedec_methods.particles import filtered, resampled, weights_of
from edgedec_methods.predicate import AnyText, PredicateConstraint
from edgedec_methods.sampled_steps import Steps, write_steps

pytestmark = pytest.mark.slow

N_VOCAB, LENGTH = 4, 4
TABLE = random_table(8, n_vocab=N_VOCAB, length=LENGTH, spread=1.2)
# After 1 the grammar hardly leaves what the model wants, after 2 and 3 it does; (2, 2) leads nowhere.
TEXTS: tuple[Ids, ...] = ((1, 3, 1, 2), (1, 2), (1, 2, 3), (2, 1), (2, 3, 3), (3, 3), (3, 1, 1, 1), (3, 1, 2))
LAW, MASS = kept_law(TABLE, TEXTS, N_VOCAB)
ENDED = {text: math.exp(log_law(TABLE, (*text, END))) for text in TEXTS}
FUNCTION_MASS = sum(ENDED.values())
FUNCTION_LAW = {(*text, END): p / FUNCTION_MASS for text, p in ENDED.items()}


class _Letters:
    """The tokenizer of the table: token i is the i-th letter, and token 0 ends a text."""

    n_vocab = N_VOCAB

    def piece(self, token_id: int) -> bytes:
        return letters([token_id]).encode() if token_id else b""

    def is_end(self, token_id: int) -> bool:
        return token_id == 0


SAID = {letters(text) for text in TEXTS}


def says(text: str, is_end: bool) -> bool:
    """Say what the grammar says, but that a text must end by an end token."""
    return text in SAID if is_end else any(each.startswith(text) for each in SAID)


def by_mask() -> Constraint:
    """Open the grammar."""
    return Constraint(LanguageState(TEXTS, N_VOCAB, dead=[(2, 2)]))


def by_function() -> Constraint:
    """Open the same, said by a function."""
    tokenizer: Any = _Letters()
    return PredicateConstraint(AnyText(tokenizer), says, tokenizer)


def found(n: int, seed: int, opener: Callable[[], Constraint], least: float = 0.5) -> Weighted | None:
    """Return n weighted texts; None where all came to a dead end."""
    texts, branches = table_texts(TABLE, max_tokens=5)
    try:
        with texts:
            return constrained(texts, n, opener, seed=seed, least=least)
    except DeadEndError:
        return None
    finally:
        assert not branches.held


WAYS = {"mask": (by_mask, LAW, MASS), "function": (by_function, FUNCTION_LAW, FUNCTION_MASS)}


def drawn_law(n: int, runs: int, opener: Callable[[], Constraint], law: dict[Ids, float]) -> dict[Ids, float]:
    """Return the estimated law of the drawn text: the mean of the normalized weights over many runs."""
    shares = defaultdict[Ids, float](float)
    for run in range(runs):
        result = found(n, 1000 * run, opener)
        if result is None:
            continue
        weights = np.exp(result.log_weights - result.log_weights.max())
        for text, share in zip(result.texts, weights / weights.sum(), strict=True):
            if share > 0:
                shares[named(text, law)] += float(share)
    total = sum(shares.values())
    return {ids: share / total for ids, share in shares.items()}


def named(text: PartialText, law: dict[Ids, float]) -> Ids:
    """Return a text's tokens as the law names them: with its end token where it could have gone on."""
    return text.token_ids if text.token_ids in law else (*text.token_ids, END)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("n", "runs"), [(1, 800), (2, 500), (5, 250)])
def test_weights_are_right_in_expectation(way: str, n: int, runs: int) -> None:
    """For every n, whatever is drawn anew: E[mean of the weights of the texts that say x] = p(x), and their sum Z."""
    opener, law, mass = WAYS[way]
    sums = np.zeros((runs, len(law)))
    places, n_redrawn = {ids: i for i, ids in enumerate(law)}, 0
    for run in range(runs):
        result = found(n, 1000 * run, opener, least=0.9)
        if result is None:
            continue  # all weights are 0
        n_redrawn += result.n_redrawn
        for text, log_weight in zip(result.texts, result.log_weights, strict=True):
            if log_weight > -math.inf:
                sums[run, places[named(text, law)]] += math.exp(log_weight) / n
        assert result.log_mass == pytest.approx(math.log(sums[run].sum()))
    errors = sums.std(axis=0) / math.sqrt(runs)
    expected = np.array([p * mass for p in law.values()])
    often = (sums > 0).sum(axis=0) >= 20  # else the error is not known
    assert often.sum() >= len(law) / 2
    assert (np.abs(sums.mean(axis=0) - expected) <= 4.5 * errors)[often].all()
    assert (n_redrawn > runs / 8) == (n > 1)


@pytest.mark.parametrize("way", WAYS)
def test_the_drawn_text_nears_the_models_own_law(way: str) -> None:
    """KL to the law of the model's texts that keep to the grammar falls with the number of texts, to nearly nothing."""
    opener, law, _ = WAYS[way]
    sizes = ((1, 300), (4, 120), (16, 40), (64, 10))
    kl = [divergence(drawn_law(n, runs, opener, law), law) for n, runs in sizes]
    assert kl[0] > 1.5 * kl[1] > 3 * kl[2]
    assert kl[0] > 0.1
    assert kl[3] < 0.05


def test_the_text_is_drawn_by_the_weights() -> None:
    """`drawn` falls on each text as often as its weight says, and never on one without a weight."""
    counts = np.zeros(2)
    for seed in range(300):
        result = found(4, 1000 * seed, by_mask)
        if result is None:
            continue
        weights = np.exp(result.log_weights - result.log_weights.max())
        weights /= weights.sum()
        assert weights[result.drawn] > 0
        counts += [weights[result.drawn], (weights**2).sum()]
    assert counts[0] == pytest.approx(counts[1], rel=0.08)


@pytest.mark.parametrize("seed", range(20))
def test_one_text_is_the_one_of_the_mask(seed: int) -> None:
    """With n = 1 each token is drawn by the mask with the seed's noise, and a dead end is an error."""
    constraint, written = by_mask(), list[int]()
    try:
        while not constraint.is_complete:
            place = DrawPlace(TABLE[tuple(written)], SamplingParams(1.0, top_p=1.0), (), Noise(seed), 1 + len(written))
            written.append(constraint.commit(constraint.choose(place, ())))
    except DeadEndError:
        assert found(1, seed, by_mask) is None
    else:
        result = found(1, seed, by_mask)
        assert result is not None
        assert result.text.token_ids == tuple(token for token in written if token != END)


def test_constraints_are_closed_and_cut_texts_weigh_nothing() -> None:
    """Every constraint that was opened is closed once; a text that is cut before it is whole is never drawn."""
    states = list[LanguageState]()

    def opener() -> Constraint:
        states.append(LanguageState(TEXTS, N_VOCAB))
        return Constraint(states[-1])

    texts, _ = table_texts(TABLE, max_tokens=3)
    with texts:
        result = constrained(texts, 16, opener, seed=2, least=1.0)
    assert result.n_redrawn
    assert len(states) > 16
    assert {state.n_closed for state in states} == {1}
    whole = {ids for ids in TEXTS if len(ids) <= 3}
    for text, log_weight in zip(result.texts, result.log_weights, strict=True):
        assert (log_weight > -math.inf) == (text.token_ids in whole)
    with table_texts(TABLE, max_tokens=1)[0] as short, pytest.raises(DeadEndError, match="allow more tokens"):
        constrained(short, 4, by_mask)


@pytest.mark.parametrize(
    ("options", "match"),
    [({"n": 0}, "n is"), ({"n": True}, "n is"), ({"temperature": 0}, "temperature"), ({"least": 2}, "least")],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], match: str) -> None:
    """Before anything is written."""
    texts, branches = table_texts(TABLE, max_tokens=2)
    with texts, pytest.raises(OptionError, match=match):
        constrained(texts, **{"n": 2, "open_constraint": by_mask, **options})
    with texts, pytest.raises(OptionError, match="to keep to"):
        constrained(texts, 2, lambda: None)
    assert branches.n_opened == 1


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
