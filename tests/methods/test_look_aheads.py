"""AdaDec and CNTP against look-aheads and trials that are written one by one, and what they reduce to."""

import math
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.decoding.plain_texts import LENGTH, PARAMS, PROMPT, greedy, is_over, said, sampled, table_of
from support.decoding.table_branches import Ids, Table, letters, log_law, table_texts

from edgedec.errors import OptionError
from edgedec.logit_ops import NUMPY_ROW_OPS, entropy_of
from edgedec.sampling import Noise, draw
from edgedec_methods.adadec import GENERAL, LookAhead, fitted_threshold, reranked, threshold_of
from edgedec_methods.cntp import Caution, cautious


def plain_reranked(table: Table, ahead: LookAhead) -> Ids:
    """Decode with a look-ahead at every unsure position, each from its beginning, one token a time."""
    ids: Ids = ()
    while not is_over(ids):
        order = np.argsort(-table[ids], kind="stable")
        token = int(order[0])
        if entropy_of(table[ids], NUMPY_ROW_OPS) >= ahead.entropy:
            found = dict[int, float]()
            for candidate in map(int, order[: ahead.n_candidates]):
                look = (*ids, candidate)
                while not is_over(look) and len(look) - len(ids) < ahead.n_tokens:
                    look = (*look, int(np.argmax(table[look])))
                found[candidate] = (log_law(table, look) - log_law(table, ids)) / (len(look) - len(ids))
            token = max(found, key=found.__getitem__)
        ids = (*ids, token)
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ahead", [LookAhead(1.2, 3, 3), LookAhead(0.0, 2, 5), LookAhead(1.9, 4, 2)])
def test_reranked_texts_are_those_of_look_aheads_one_by_one(seed: int, ahead: LookAhead) -> None:
    """What is kept of a winner's look-ahead is what decoding on would have written."""
    texts, branches = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        found = reranked(texts, ahead)
        assert said(found) == plain_reranked(table_of(seed), ahead)
        assert found.logprob == pytest.approx(log_law(table_of(seed), said(found)), abs=1e-5)
        assert len(branches.held) == 1
    assert not branches.held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("ahead", [LookAhead(math.inf), LookAhead(0.0, n_candidates=1)])
def test_without_look_aheads_it_is_greedy(seed: int, ahead: LookAhead) -> None:
    """An infinite threshold, or one candidate."""
    texts, _ = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        assert said(reranked(texts, ahead)) == greedy(table_of(seed))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_threshold_is_that_of_a_plain_fit(seed: int) -> None:
    """Where a logistic function, climbed to step by step on as many right as wrong tokens, is one half."""
    rng = np.random.default_rng(seed)
    bits = rng.gamma(1.0, 1.5, 400)
    right = rng.random(400) < 1 / (1 + np.exp(2 * bits - 3))
    n = int(min(right.sum(), (~right).sum()))
    thin = [side[[round(i * (len(side) - 1) / (n - 1)) for i in range(n)]] for side in (bits[right], bits[~right])]
    weight, bias, x, y = 0.0, 0.0, np.concatenate(thin), np.repeat([1.0, 0.0], n)
    for _ in range(4000):
        short = y - 1 / (1 + np.exp(-weight * x - bias))
        weight, bias = weight + 0.5 * float((short * x).mean()), bias + 0.5 * float(short.mean())
    assert fitted_threshold(bits, right) == pytest.approx(-bias / weight, rel=0.01)
    for wrong in (np.ones(400, np.bool_), np.zeros(400, np.bool_), ~right):
        with pytest.raises(OptionError, match="right and wrong tokens"):
            fitted_threshold(bits, wrong)


def test_the_threshold_is_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its shape; another model has the general one."""
    monkeypatch.setattr("edgedec_methods.adadec.THRESHOLDS", {("llama", 30, 576): 1.5})
    cards: Any = [SimpleNamespace(architecture=name, n_layer=30, n_embd=576) for name in ("llama", "other")]
    assert [threshold_of(card) for card in cards] == [1.5, GENERAL]


def plain_cautious(table: Table, seed: int, caution: Caution, mark: int | None = None) -> Ids:
    """Write with caution, one trial after another, each from its beginning; the token `mark` ends a trial."""
    ids: Ids = ()
    while not is_over(ids):
        n = caution.n_trials(entropy_of(table[ids], NUMPY_ROW_OPS))
        trials = list[Ids]()
        for k in range(n):
            trial, n_most = ids, caution.most_tokens if n > 1 else 1
            while not is_over(trial) and len(trial) - len(ids) < n_most:
                seen = (*PROMPT, *trial)
                trial = (*trial, draw(table[trial], PARAMS, seen, Noise(seed + k), len(seen)))
                n_most = 0 if trial[-1] == mark else n_most
            trials.append(trial)
        ids = max(trials, key=lambda trial: (log_law(table, trial) - log_law(table, ids)) / (len(trial) - len(ids)))
    return ids


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_cautious_texts_are_those_of_trials_one_by_one(seed: int) -> None:
    """Forked trials in common forwards choose what trials one after another choose."""
    table, caution = table_of(seed), Caution(4, 0.5, 1.8, most_tokens=3)
    texts, branches = table_texts(table, max_tokens=LENGTH)
    with texts:
        assert said(cautious(texts, PARAMS, seed, caution)) == plain_cautious(table, seed, caution)
        assert len(branches.held) == 1
    assert not branches.held


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("caution", [Caution(1), Caution(5, low=50.0, high=60.0)])
def test_without_trials_it_is_plain_sampling(seed: int, caution: Caution) -> None:
    """One trial at most, or no position that is unsure: the text of the seed."""
    texts, _ = table_texts(table_of(seed), max_tokens=LENGTH)
    with texts:
        assert said(cautious(texts, PARAMS, seed, caution)) == sampled(table_of(seed), seed)


@pytest.mark.slow
@pytest.mark.parametrize("mark", ".,;:!?\n")
def test_a_trial_ends_at_punctuation(mark: str) -> None:
    """After the first token that has a mark, which stays; several of the texts would be others without that."""
    caution, n_other = Caution(3, 0.0, 0.1, most_tokens=LENGTH), 0
    for seed, token in product(range(6), range(1, 5)):
        table, letter = table_of(seed), letters((token,))
        texts, _ = table_texts(table, max_tokens=LENGTH)
        texts.decode = lambda ids, letter=letter: letters(ids).replace(letter, f" {mark}")  # type: ignore[misc]
        with texts:
            written = said(cautious(texts, PARAMS, seed, caution))
        assert written == plain_cautious(table, seed, caution, mark=token)
        n_other += written != plain_cautious(table, seed, caution)
    assert n_other >= 5
