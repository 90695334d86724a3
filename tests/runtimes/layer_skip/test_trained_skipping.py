"""Trained layer skipping as the benchmarks simulate it: exact fits, schedules as decoding runs them, the best sets."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_models import byte_ids, tiny_llama

from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet, Model
from edgedec_apps.evaluation.layer_judge import Judge
from edgedec_apps.evaluation.layer_score import Score
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.layer_skip.layer_sets import left_out, without

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks" / "studies"))

from prompt_layer_sets import behind, least_harmful, scores_alone
from trained_skipping import (
    REUSES,
    RIDGE,
    LowRank,
    Reuse,
    Schedule,
    all_states,
    dropped_states,
    features,
    fit_corrections,
    fit_low_rank,
    judge_settings,
    last_run,
    mean_share,
    scheduled_states,
    stand_in,
    unexplained,
)

N_LAYER, N_EMBD, N_KV, N_FF, RANK = 5, 64, 32, 96, 3
NO_ROWS = np.empty(0, np.int32)
TEXT = "Every second layer rests at every second place, and what it last said is said again."


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of five layers."""
    return tiny_llama(tmp_path_factory.mktemp("models") / "m.gguf", seed=5, n_layer=N_LAYER, n_ff=N_FF)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    """It, on the cpu runtime."""
    with Cpu().load(path, LoadOptions(n_ctx=128, n_threads=1)) as model:
        yield model


def text(begin: int = 0, n: int = 40) -> NDArray[np.int32]:
    """Return n tokens of the text."""
    return np.array(byte_ids(TEXT)[begin : begin + n], np.int32)


def planted(noise: float = 0.0) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return features f64[200, 12], what a map of rank 3 makes of them f64[200, 10], and the map f64[12, 10]."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((200, 12))
    whole = rng.standard_normal((12, RANK)) @ rng.standard_normal((RANK, 10))
    return x, x @ whole + noise * rng.standard_normal((200, 10)), whole


def test_a_planted_map_is_recovered() -> None:
    """A fit of the rank of the map that made the data is that map, and a wider one as well."""
    x, y, whole = planted()
    for rank in (RANK, RANK + 2):
        fitted = fit_low_rank(x, y, rank)
        assert (fitted.down.shape, fitted.up.shape) == ((12, rank), (rank, 10))
        assert np.abs(fitted.down @ fitted.up - whole).max() < 1e-12 * np.abs(whole).max() * 12


def test_a_lower_rank_leaves_the_least_error() -> None:
    """What a fit of lower rank leaves is what no map explains, and the smallest singular values of what one does."""
    x, y, _ = planted(noise=0.5)
    explained = x @ np.linalg.lstsq(x, y, rcond=None)[0]
    sizes = np.linalg.svd(explained, compute_uv=False) ** 2
    for rank in (1, 2, RANK):
        fitted = fit_low_rank(x, y, rank)
        error = float(((y - x @ fitted.down @ fitted.up) ** 2).sum())
        assert error == pytest.approx(float(((y - explained) ** 2).sum() + sizes[rank:].sum()), rel=1e-9)


def test_a_ridge_shrinks_as_ridge_regression_does() -> None:
    """At full rank the map is ridge regression's, with a ridge of that share of the mean square of a feature."""
    x, y, _ = planted(noise=0.5)
    fitted = fit_low_rank(x, y, 10, ridge=0.3)
    ridge = 0.3 * float((x**2).mean()) * len(x)
    expected = np.linalg.inv(x.T @ x + ridge * np.eye(12)) @ x.T @ y
    assert np.abs(fitted.down @ fitted.up - expected).max() < 1e-12


def test_layers_run_at_multiples_and_in_the_prompt() -> None:
    """The last position where droppable layers ran: each of the prompt, then each c-th."""
    found = last_run(12, Schedule((1,), 4, 3, "update")).tolist()
    assert found == [0, 1, 2, 2, 4, 4, 4, 4, 8, 8, 8, 8]
    assert last_run(4, Schedule((1,), 1, 0, "update")).tolist() == [0, 1, 2, 3]


def test_what_stands_in_for_a_layer() -> None:
    """Its input, its last output, or its input and its last update; a correction is added where it did not run."""
    x = np.array([[1, 2], [3, 4], [5, 6]], np.float32)
    ran = np.array([[11, 22], [0, 0], [0, 0]], np.float32)
    last = np.zeros(3, np.intp)
    assert [stand_in(x, ran, last, reuse)[2].tolist() for reuse in REUSES] == [[5, 6], [11, 22], [15, 26]]
    ones = LowRank(np.array([[0.0], [0.0], [2.0]]), np.array([[1.0, 10.0]]))
    corrected = dropped_states(Schedule((1,), 3, 1, "nothing"), x, ran, ones)
    assert corrected.tolist() == [[11, 22], [5, 24], [7, 26]]
    assert np.allclose(features(x)[1], [3 / 12.5**0.5, 4 / 12.5**0.5, 1], rtol=1e-9)


@pytest.mark.parametrize("reuse", REUSES)
def test_without_a_position_left_out_it_is_the_full_model(model: Model, reuse: Reuse) -> None:
    """A cycle of one gives the full model's states, bit for bit, and no distance from it."""
    session, schedule = model.session(64), Schedule((1, 2, 3), 1, 0, reuse)
    found = scheduled_states(session, text(), schedule, {})
    assert np.array_equal(found, all_states(session, text())[-1])
    tally = judge_settings(session, [text()], {"full": (schedule, {})})["full"]
    assert (tally.kl, tally.same, tally.dropped) == ([0.0] * 40, [True] * 40, [False] * 40)


@pytest.mark.parametrize("reuse", REUSES)
def test_a_schedule_is_what_decoding_token_by_token_does(model: Model, reuse: Reuse) -> None:
    """All positions layer by layer have the bits of token after token, each layer holding what it last made."""
    schedule, tokens = Schedule((1, 3), 3, 4, reuse), text(n=20)
    found = scheduled_states(model.session(64), tokens, schedule, {})
    session, held = model.session(64), {layer: np.zeros((2, N_EMBD), np.float32) for layer in schedule.droppable}
    for position in range(len(tokens)):
        runs = position < 4 or position % 3 == 0
        begun = session.forward(
            tokens[position : position + 1],
            n_past=position,
            layers=LayerSet.of(N_LAYER, [0]),
            rows=NO_ROWS,
            taps=(0,),
        )
        x = begun.hidden[0][0].copy()
        for layer in range(1, N_LAYER):
            forward = session.forward(
                hidden=x[None],
                n_past=position,
                resume_after=layer - 1,
                layers=LayerSet.of(N_LAYER, [layer]),
                rows=NO_ROWS,
                taps=(layer,),
            )
            after = forward.hidden[layer][0].copy()
            if layer in held and runs:
                held[layer] = np.stack([after, after - x])
            elif layer in held:
                after = {"nothing": x, "state": held[layer][0], "update": x + held[layer][1]}[reuse]
            x = after
        assert np.array_equal(found[position], x), position


def test_a_dropped_layer_changes_only_what_comes_after(model: Model) -> None:
    """Within the prompt the states are the full model's; behind it they are not."""
    session = model.session(64)
    found = scheduled_states(session, text(), Schedule((2,), 64, 10, "nothing"), {})
    full = all_states(session, text())[-1]
    assert np.array_equal(found[:10], full[:10])
    assert not np.any(np.all(found[10:] == full[10:], axis=1))


def test_a_full_correction_of_enough_features_is_exact(model: Model) -> None:
    """With fewer rows than features a fit leaves nothing on its own text, over several layers."""
    session, schedule = model.session(64), Schedule((1, 2, 4), 2, 4, "update")
    truth = all_states(session, text())
    fitted = fit_corrections(session, [text()], [truth], schedule, N_EMBD, ridge=1e-10)
    assert sorted(fitted) == [1, 2, 4]
    plain, corrected = (scheduled_states(session, text(), schedule, maps) for maps in ({}, fitted))
    error, left = (float(np.abs(states - truth[-1]).max()) for states in (plain, corrected))
    assert left < 1e-3 * error


@pytest.mark.parametrize("reuse", REUSES)
def test_what_a_stand_in_leaves_unexplained(model: Model, reuse: Reuse) -> None:
    """It is a share of the squared update at the positions left out; a layer's input alone leaves all of it."""
    session, schedule, layer = model.session(64), Schedule((), 4, 3, reuse), 2
    fitted, judged = ([all_states(session, tokens)] for tokens in (text(40), text(n=12)))
    before, after = judged[0][layer - 1], judged[0][layer]
    rows, last = [3, 5, 6, 7, 9, 10, 11], [2, 4, 4, 4, 8, 8, 8]
    made = {"nothing": before[rows], "state": after[last], "update": before[rows] + (after[last] - before[last])}
    error = (after[rows] - made[reuse]).astype(np.float64)
    added = float(((after[rows] - before[rows]).astype(np.float64) ** 2).sum())
    assert unexplained(schedule, layer, 0, fitted, judged) == pytest.approx(float((error**2).sum()) / added, rel=1e-12)
    assert reuse != "nothing" or unexplained(schedule, layer, 0, fitted, judged) == 1
    corrections = fit_corrections(session, [text(40)], fitted, replace(schedule, droppable=(layer,)), 2, RIDGE)
    error = error - features(before[rows]) @ corrections[layer].down @ corrections[layer].up
    found = unexplained(schedule, layer, 2, fitted, judged)
    assert found == pytest.approx(float((error**2).sum()) / added, rel=1e-9)


def test_bytes_of_a_step(path: Path) -> None:
    """A dropped layer reads a norm, keys' and values' matrices and its correction; all of it counts by the cycle."""
    matrices = 2 * N_EMBD * N_EMBD + 2 * N_KV * N_EMBD + 3 * N_EMBD * N_FF
    layer = 4 * (matrices + 2 * N_EMBD)
    total = N_LAYER * layer + 4 * (260 * N_EMBD + N_EMBD)
    kept = 4 * (N_EMBD + 2 * N_KV * N_EMBD)
    correction = 2 * (N_EMBD + 1) * 8 + 2 * N_EMBD * 8
    assert mean_share(path, Schedule((1, 2), 1, 0, "update"), 8) == 1
    for rank, added in ((0, 0), (8, correction)):
        expected = (total + 3 * (total - 2 * (layer - kept - added))) / (4 * total)
        assert mean_share(path, Schedule((1, 2), 4, 0, "update"), rank) == pytest.approx(expected, rel=1e-12)


def test_the_least_harmful_layers_go(model: Model) -> None:
    """Every layer but the first and the last is scored alone; those of least harm go, the earlier one of a tie."""
    judge = Judge(model.session(64), [text(), text(40)])
    found = scores_alone(judge, N_LAYER)
    assert found == [judge.score(without(N_LAYER, [(layer, 0), (layer, 1)])) for layer in (1, 2, 3)]
    assert left_out(least_harmful([2.0, 1.0, 1.0, 3.0], 1)) == [(2, 0), (2, 1)]
    assert least_harmful([2.0, 1.0, 1.0, 3.0], 3).mlp.tolist() == [True, False, False, False, True, True]


def test_scores_behind_a_prompt(model: Model) -> None:
    """They are those of the positions that only the whole text has."""
    found = behind(Score(0.5, 0.5, 1.0, 40), Score(0.75, 0.25, 0.5, 20))
    assert found == Score(agreement=0.25, overlap=0.75, kl=1.5, n_positions=20)
    session, layers = model.session(64), without(N_LAYER, [(2, 0), (2, 1)])
    whole, prompt = (Judge(session, [text(n=n)]).score(layers) for n in (40, 24))
    rows = [session.forward(text(), n_past=0, layers=some, rows="all").logits[24:].argmax(1) for some in (None, layers)]
    assert behind(whole, prompt).agreement == pytest.approx(float((rows[0] == rows[1]).mean()), abs=1e-12)
    assert behind(whole, prompt).n_positions == 16
