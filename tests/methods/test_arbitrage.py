"""Arbitrage against a plain form, and the fit of its router."""

from contextlib import ExitStack
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from support.decoding.plain_texts import PARAMS, grown
from support.decoding.table_branches import END, Ids, Table, random_table, table_texts
from support.models.tiny_models import byte_ids, tiny_llama

import edgedec
from edgedec.api.branching import partial_texts
from edgedec.errors import OptionError, RequestError
from edgedec.sampling import SamplingParams
from edgedec_methods.arbitrage import Arbitrated, Router, Translation, arbitrated, fitted_router, translation
from edgedec_methods.sampled_steps import Steps

LENGTH = 5
ROUTER = Router((-1.0, 0.7, -0.4, 0.1, 0.2), -1.2)
SWAPPED = {0: 0, 1: 2, 2: 1, 3: 3}
BETWEEN = Translation(lambda ids: [SWAPPED[i] for i in ids], lambda ids: [SWAPPED[i] for i in ids])


@cache
def tables(seed: int) -> tuple[Table, Table]:
    """Return the small and the large model."""
    return (
        random_table(seed, n_vocab=4, length=LENGTH + 1),
        random_table(seed + 100, n_vocab=4, length=LENGTH + 1, spread=2.0),
    )


def logs_of(table: Table, ids: Ids) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return the log-probabilities behind a text, without its end token."""
    row = table[tuple(t for t in ids if t != END)].astype(np.float64)
    return np.asarray(row - np.log(np.exp(row).sum()))


def plain(seed: int, threshold: float, swap: bool) -> tuple[Ids, list[bool], int]:
    """Write step by step, without forks; both models see the whole text at every step."""
    small, large = tables(seed)
    ids, kept, n_large = Ids(), list[bool](), 0
    while len(ids) < LENGTH and END not in ids:
        tried = grown(small, seed, ids, 2, LENGTH)
        new = range(len(ids), len(tried))
        mean = sum(logs_of(small, tried[:i])[tried[i]] for i in new) / len(new)
        nats = [-float((np.exp(logs) * logs).sum()) for logs in (logs_of(small, ids), logs_of(small, tried))]
        kept.append(ROUTER.chance([mean, *nats, np.log(len(new)), len(kept)]) < threshold)
        if kept[-1]:
            ids = tried
            continue
        begun = tuple(SWAPPED[i] for i in ids) if swap else ids
        written = grown(large, seed, begun, 2, LENGTH)
        n_large += sum(i != END for i in written[len(ids) :])
        ids = tuple(SWAPPED[i] for i in written) if swap else written
    return ids, kept, n_large


def run(seed: int, threshold: float, between: Translation | None = None, n_large: int = LENGTH) -> Arbitrated:
    """Return what Arbitrage writes with two tables; check that nothing is left."""
    small, large = tables(seed)
    (quick, one), (sure, other) = table_texts(small, max_tokens=LENGTH), table_texts(large, max_tokens=n_large)
    with quick, sure:
        found = arbitrated(quick, sure, Steps(PARAMS, seed, None, 2), ROUTER, threshold=threshold, between=between)
    assert not one.held
    assert not other.held
    return found


@pytest.mark.slow
@pytest.mark.parametrize("between", [None, BETWEEN], ids=["one vocabulary", "two"])
def test_steps_are_those_of_a_plain_form(between: Translation | None) -> None:
    """What the large model missed is read before it writes, in its own tokens."""
    all_kept = set[bool]()
    for seed in range(8):
        for threshold in (0.0, 0.35, 0.5, 1.0):
            found = run(seed, threshold, between)
            ids = (*found.text.token_ids, END) if found.text.ended == "stop" else found.text.token_ids
            expected = plain(seed, threshold, between is not None)
            assert (ids, list(found.steps_kept), found.n_large) == expected, (seed, threshold)
            assert [chance < threshold for chance in found.chances] == list(found.steps_kept)
            all_kept |= set(found.steps_kept)
    assert all_kept == {False, True}


@pytest.mark.slow
def test_two_models_of_two_vocabularies(tmp_path: Path) -> None:
    """Handed over as words, a step is the same text to both; threshold 0 gives the text that the large model writes."""
    letters = dict.fromkeys(byte_ids("abc d"), 60.0)
    steps = Steps(SamplingParams(temperature=0.0, logit_bias=letters), 0, None, 5)
    paths = [tiny_llama(tmp_path / f"{seed}.gguf", seed=seed, n_vocab=260 + seed) for seed in (1, 2)]
    with ExitStack() as opened:
        small, large = (
            opened.enter_context(edgedec.load(path, runtime="cpu", n_ctx=128, draft="off", offline=True))
            for path in paths
        )
        over = translation(small.tokenizer, large.tokenizer)
        for threshold, kept in ((1.0, True), (0.0, False)):
            both = (partial_texts(each, "a b", max_tokens=30) for each in (small, large))
            with next(both) as quick, next(both) as sure:
                found = arbitrated(quick, sure, steps, ROUTER, threshold=threshold, between=over)
                text = quick.text(found.text)
            engine = small if kept else large
            assert text == engine.generate("a b", max_tokens=30, temperature=0.0, logit_bias=letters).text
            assert set(found.steps_kept) == {kept}
            assert found.n_large == (0 if kept else 30)


def test_the_router_is_the_most_likely_one() -> None:
    """It finds the weights that made the labels, on the scale of the features; a constant feature changes nothing."""
    rng = np.random.default_rng(3)
    features = rng.normal(0, 1, (4000, 5)) * [1, 2, 5, 1, 0] + [0, 3, 0, 0, 7]
    true = Router((1.0, -0.5, 0.2, 0.0, 0.0), 1.0)
    better = [bool(rng.random() < true.chance(row)) for row in features]
    found = fitted_router(features, better)
    assert found.weights == pytest.approx(true.weights, abs=0.12)
    assert found.chance([0, 0, 0, 0, 7]) == pytest.approx(true.chance([0, 0, 0, 0, 7]), abs=0.05)
    always = fitted_router(np.ones((3, 5)), [True] * 3)
    assert always.chance([1, 1, 1, 1, 1]) > 0.99


def test_what_the_large_model_has_no_room_for_is_told() -> None:
    """The router asks for every step; behind two tokens, each one is the small model's."""
    for seed in range(8):
        found, whole = run(seed, 0.0, n_large=2), run(seed, 0.0)
        assert found.n_without_room == sum(found.steps_kept) == len(found.steps_kept) - 1
        assert (whole.n_without_room, sum(whole.steps_kept)) == (0, 0)


def test_what_is_refused() -> None:
    """Thresholds out of range, labels that are missing, and models that read the prompt as other tokens."""
    for threshold in (-0.1, 1.1, float("nan")):
        with pytest.raises(OptionError, match="0 to 1"):
            run(0, threshold)
    for n in (0, 2):
        with pytest.raises(OptionError, match="label"):
            fitted_router(np.ones((n, 5)), [True] * (n + n // 2))
    small, large = (table_texts(table, max_tokens=2)[0] for table in tables(0))
    small.prompt_ids = (2,)
    with pytest.raises(RequestError, match="translation"):
        arbitrated(small, large, Steps(PARAMS), ROUTER)
