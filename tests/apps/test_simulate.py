"""edgedec bench --rows, and replays of recorded drafts under other costs."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here

from edgedec.cost_curve import CostCurve
from edgedec.draft_constants import GAIN
from edgedec.errors import RequestError, StorageError
from edgedec_apps.bench.recorder import Evaluated, Proposals
from edgedec_runtimes.layer_skip.layer_sets import TunedSet, without

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks" / "speed"))

from recordings import read_recording
from replay import replay
from rooflines import DEVICES, modelled

HEAD = {"kind": "edgedec drafts 1", "model": "m", "n_bytes": 10**9, "n_params": 10**9}
ROW = {"tokens": [6, 7], "parents": [-1, 0], "paths": [0.9, 0.8], "draft_s": 0.0}
TEXT = {"id": "a", "task": "chat", "tokens": [5, 6, 7, 8, 9], "proposals": [ROW, ROW, ROW]}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


# The replay


def test_a_replay_takes_what_pays() -> None:
    """On a flat curve both nodes are verified and the bonus token comes; where rows cost as much as steps, none is."""
    rows = [Proposals((6, 7), (-1, 0), (0.9, 0.8), 0.0)] * 3
    flat = replay([5, 6, 7, 8, 9], rows, lambda n: 1.0, 8)
    assert (flat.n_tokens, flat.n_steps, flat.seconds, flat.plain_s) == (4, 2, 2.0, 4.0)
    steep = replay([5, 6, 7, 8, 9], rows, lambda n: float(n), 8)
    assert (steep.n_steps, steep.seconds) == (4, 4.0)


def test_a_wrong_proposal_costs_what_it_costs() -> None:
    """A node that the text does not take is paid for and brings nothing."""
    rows = [Proposals((1,), (-1,), (0.9,), 0.0)] * 3
    found = replay([5, 6, 7, 8], rows, lambda n: 1.0 + 0.1 * n, 8)
    assert found.n_steps == 3
    assert found.seconds == pytest.approx(1.2 + 1.2 + 1.1)  # no room for a draft before the last token


def test_drafting_is_charged_and_no_deeper_than_it_is_let_go() -> None:
    """Of three forwards n are made where n are allowed, and as many nodes are known; without any it is plain."""
    made = (Evaluated(1, 0.25),) * 3
    rows = [Proposals((6, 7, 8), (-1, 0, 1), (0.9, 0.8, 0.7), 0.0, made, (1, 2, 3))] * 4
    seconds = [
        replay([5, 6, 7, 8, 9], rows, lambda n: 1.0, 8, lambda one: one.share or 0.0, n).seconds for n in range(4)
    ]
    # 4 plain steps; 6 + bonus, then nothing is right; 6, 7 + bonus, then one without room; all at once
    assert seconds == [4.0, 1.25 + 1.25 + 1.0, 1.5 + 1.0, 1.75]


def test_a_forward_that_is_unlikely_to_pay_is_not_made() -> None:
    """After a path of 0.3, where a forward takes 0.25 and a row 0.1 of a plain step; after one of 0.4 it is.

    All that is drafted is verified, and none of it right: 2 or 3 forwards and rows, then 4 plain steps.
    """
    made = (Evaluated(1, 0.25),) * 3
    for path, seconds in ((0.3, 0.5 + 1.2 + 4), (0.4, 0.75 + 1.3 + 4)):
        rows = [Proposals((1, 2, 3), (-1, 0, 1), (0.9, path, path), 0.0, made, (1, 2, 3))]
        found = replay([5, 6, 7, 8, 9, 10], rows, lambda n: 0.9 + 0.1 * n, 8, lambda one: 0.25)
        assert found.seconds == pytest.approx(seconds)


# What `auto` does


def agreeing(agreement: float, share: float, n_tokens: int = 1200, depth: int = 8) -> list[Proposals]:
    """Return chains whose every token is right with that probability, for the text 0, 1, 2, ..."""
    rng = np.random.default_rng(0)
    parents, after = tuple(range(-1, depth - 1)), tuple(range(1, depth + 1))
    paths, made = tuple(agreement**i for i in after), (Evaluated(1, share),) * depth
    rows = []
    for i in range(n_tokens):
        right = (rng.random(depth) < agreement).cumprod()
        tokens = tuple(i + 1 + j if right[j] else -1 for j in range(depth))
        rows.append(Proposals(tokens, parents, paths, 0.0, made, after))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", DEVICES)
@pytest.mark.parametrize(("agreement", "share", "pays"), [(0.97, 0.3, True), (0.9, 0.5, True), (0.67, 0.79, False)])
def test_auto_takes_a_tuned_set_where_the_replay_finds_it_faster(
    name: str, agreement: float, share: float, pays: bool
) -> None:
    """On every modelled device: what its curve promises of a set is what chains of that agreement bring there."""
    cost = modelled(DEVICES[name], 10**9, 15 * 10**8)
    tuned = TunedSet(without(4, [(1, 0)]), share, share, agreement, 1000)
    promised = tuned.promised_gain(CostCurve({n: cost(n) for n in range(1, 17)}), 8)
    rows = agreeing(agreement, share)
    found = [replay(range(1200), rows, cost, 8, lambda made: share * cost(1), n) for n in range(1, 9)]
    speedup = max(one.plain_s / one.seconds for one in found)
    assert (promised >= GAIN) is pays
    assert (speedup >= GAIN) is pays
    assert speedup == pytest.approx(promised, rel=0.05)


# Files


@pytest.mark.slow
def test_what_bench_records_is_charged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a draft model, from the recording to the table."""
    monkeypatch.setattr("edgedec_runtimes.cpu.tiles.read_rates.memory_rate", lambda *_: 1e10)
    target, small = (tiny_llama(tmp_path / f"{seed}.gguf", seed=seed, n_ctx_train=512) for seed in (1, 2))
    prompts, rows = write(tmp_path / "prompts.jsonl", {"id": "a", "task": "chat", "turns": ["abab"]}), tmp_path / "rows"
    model = ("--draft", "model", "--draft-option", f"model={small}")
    assert run_here("bench", target, "--prompts", prompts, "-n", "6", *model, "--rows", rows).code == 0
    head, found = (json.loads(line) for line in rows.read_text().splitlines())
    assert head["draft_model"]["n_bytes"] == small.stat().st_size
    assert (len(found["tokens"]), len(found["proposals"])) == (6, 4)  # the first token and the last have no draft
    assert all(row["evaluated"] and {share for _, share in row["evaluated"]} == {None} for row in found["proposals"])
    assert read_recording(rows).charged


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "not a file of recorded drafts"),
        ([{"kind": "other"}], "not a file of recorded drafts"),
        ([HEAD], "no prompt"),
        ([HEAD, {"id": "a"}], "line 2"),
        ([HEAD, TEXT | {"proposals": []}], "line 2: 5 tokens with proposals for 0"),
        ([HEAD, TEXT | {"proposals": [ROW | {"parents": [1, 0]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"paths": [2.0, 0.1]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[0, 0.5]]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1, 1.5]]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1]]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1, 0.5]], "after": [1, 2]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1, 0.5]], "after": [1]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"evaluated": [[1, None]]}] * 3}], "line 1: no draft model"),
        ([HEAD | {"n_bytes": 0}, TEXT], "line 1"),
        ([{"kind": "edgedec drafts 1"}, TEXT], "line 1"),
    ],
)
def test_damaged_rows_are_refused(tmp_path: Path, lines: list[object], words: str) -> None:
    """The line is named."""
    with pytest.raises(RequestError, match=re.escape(words)):
        read_recording(write(tmp_path / "rows.jsonl", *lines))


def test_rows_that_can_not_be_read_are_refused(tmp_path: Path) -> None:
    """A file that is not there."""
    with pytest.raises(StorageError, match="can't be read"):
        read_recording(tmp_path / "none.jsonl")
