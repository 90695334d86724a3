"""Weighted texts under a grammar: weights are right in expectation, and the drawn text nears the model's own law."""

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.decoding.table_branches import END, Ids, letters, log_law, random_table, table_texts
from support.decoding.table_language import LanguageState, divergence, kept_law

from edgedec.choosing.partial_texts import PartialText
from edgedec.constraint import Constraint, DrawPlace
from edgedec.errors import DeadEndError, OptionError
from edgedec.sampling import Noise, SamplingParams
from edgedec_methods.constrained import Weighted, constrained
from edgedec_methods.predicate import AnyText, PredicateConstraint

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
