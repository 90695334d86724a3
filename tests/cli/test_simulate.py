"""edgedec bench --rows and edgedec simulate: recorded drafts under other costs."""

import json
from pathlib import Path

import pytest
from support.command_line import run_here

from edgedec.recording import Proposals, replay
from edgedec_apps.rooflines import DEVICES, modelled

HEAD = {"kind": "edgedec drafts 1", "model": "m", "n_bytes": 10**9, "n_params": 10**9}
ROW = {"tokens": [6, 7], "parents": [-1, 0], "paths": [0.9, 0.8], "draft_s": 0.0}
TEXT = {"id": "a", "task": "chat", "tokens": [5, 6, 7, 8, 9], "proposals": [ROW, ROW, ROW]}


def write(path: Path, *lines: object) -> Path:
    """Write a file of rows."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


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


def test_figures_on_a_modelled_device_and_on_a_measured_curve(tmp_path: Path) -> None:
    """The device says that it is modelled; a curve that bench wrote is read."""
    rows = write(tmp_path / "rows.jsonl", HEAD, TEXT)
    document = json.loads(run_here("simulate", rows, "--curve", "raspberry-pi-5", "--json").text)
    cost = modelled(DEVICES["raspberry-pi-5"], 10**9, 10**9)
    assert "MODELLED" in document["curve"]
    assert document["all"]["plain_tok_s"] == pytest.approx(1 / cost(1))
    assert document["all"]["accepted_per_step"] == pytest.approx(1.0)
    assert document["all"]["speedup"] == pytest.approx(4 * cost(1) / (cost(3) + cost(1)))
    curve = tmp_path / "curve.json"
    curve.write_text('{"curve": {"1": 0.1, "4": 0.1}}')
    assert json.loads(run_here("simulate", rows, "--curve", curve, "--json").text)["all"]["speedup"] == pytest.approx(2)
    shown = run_here("simulate", rows).text
    assert all(name in shown for name in DEVICES)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ([], "no file of recorded drafts"),
        ([{"kind": "other"}], "no file of recorded drafts"),
        ([HEAD], "no prompt"),
        ([HEAD, {"id": "a"}], "line 2"),
        ([HEAD, TEXT | {"proposals": []}], "line 2: 5 tokens with proposals for 0"),
        ([HEAD, TEXT | {"proposals": [ROW | {"parents": [1, 0]}] * 3}], "line 2"),
        ([HEAD, TEXT | {"proposals": [ROW | {"paths": [2.0, 0.1]}] * 3}], "line 2"),
        ([{"kind": "edgedec drafts 1"}, TEXT], "line 1"),
    ],
)
def test_damaged_rows_are_refused(tmp_path: Path, lines: list[object], words: str) -> None:
    """The line is named."""
    run_here("simulate", write(tmp_path / "rows.jsonl", *lines)).failed(40, words)


def test_what_is_no_curve_is_refused(tmp_path: Path) -> None:
    """Neither a device nor a file, and a file of something else."""
    rows = write(tmp_path / "rows.jsonl", HEAD, TEXT)
    run_here("simulate", rows, "--curve", "toaster").failed(40, "toaster", "raspberry-pi-5")
    for text in ("", "[]", '{"curve": {}}', '{"curve": {"0": 1}}', '{"curve": {"a": 1}}'):
        (tmp_path / "curve.json").write_text(text)
        run_here("simulate", rows, "--curve", tmp_path / "curve.json").failed(40, "no curve")
    run_here("simulate", tmp_path / "none.jsonl").failed(60, "can't be read")
