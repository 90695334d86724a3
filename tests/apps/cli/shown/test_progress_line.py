"""Nothing is silent for long: what takes time is said, and how far it is; a pipe gets lines without control codes."""

import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from support.processes.command_line import PATIENCE_S, run_here

import edgedec
from edgedec.load_options import LoadOptions
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.progress import Progress, stage
from edgedec_apps.cli.shown.progress import ProgressLine


@contextmanager
def lines_at_once(monkeypatch: pytest.MonkeyPatch, *, every_s: float = 1000.0) -> Iterator[io.StringIO]:
    """Show work on a pipe from its beginning on, and yield what is written to standard error."""
    monkeypatch.setattr("edgedec_apps.cli.shown.progress._LINE_PATIENCE_S", 0.0)
    monkeypatch.setattr("edgedec_apps.cli.shown.progress._LINE_EVERY_S", every_s)
    monkeypatch.setattr("edgedec_apps.cli.shown.progress._TICK_S", 0.01)
    with mock.patch.object(sys, "stderr", io.StringIO()) as err:
        yield err


def wait_until(done: Callable[[], bool]) -> None:
    """Wait for what another thread does."""
    until = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_work_that_reports_nothing_is_shown_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock shows work that was only begun, again and again, and then how long it took."""
    with (
        lines_at_once(monkeypatch, every_s=0.0) as err,
        ProgressLine() as report,
        stage(report, "measuring", "a thing"),
    ):
        wait_until(lambda: err.getvalue().count("measuring a thing: 0 s so far\n") > 2)
    assert err.getvalue().endswith("measuring a thing: done in 0 s\n")


def test_what_can_be_counted_is_counted_in_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tenth is a line on a pipe; a stage that is over is not shown again."""
    with lines_at_once(monkeypatch) as err, ProgressLine() as report:
        for n in range(21):
            report(Progress("measuring", n, 20, "runs"))
    told = [f"measuring: {n} of 20 runs" for n in range(0, 20, 2)]
    assert err.getvalue().splitlines() == [*told, "measuring: done in 0 s"]


def test_quiet_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """With --quiet nothing is shown, however long it takes."""
    with lines_at_once(monkeypatch) as err, ProgressLine(quiet=True) as report, stage(report, "measuring"):
        time.sleep(0.05)
    assert err.getvalue() == ""


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
def test_a_terminal_shows_work_that_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At a terminal a bar with the seconds so far stands for work that takes long and counts nothing."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    shown = b""
    with os.fdopen(slave, "w", encoding="utf-8") as terminal, mock.patch.object(sys, "stderr", terminal):
        with ProgressLine() as report, stage(report, "measuring", "a thing"):
            while b"measuring a thing" not in shown:
                shown += os.read(master, 65536)
        terminal.write("the end")
        terminal.flush()
        while b"the end" not in shown:
            shown += os.read(master, 65536)
    os.close(master)
    assert shown.count(b"\x1b[?25l") == shown.count(b"\x1b[?25h") == 1  # the cursor is hidden, and shown again


def phases(told: list[Progress]) -> list[str]:
    """Return the phases in the order in which they began."""
    return list(dict.fromkeys(progress.phase for progress in told))


@pytest.mark.slow
def test_a_load_tells_its_stages(model: Path, tmp_path: Path) -> None:
    """on_progress is told of each stage of a load, that it began and that it is over, and how far measuring is."""
    told: list[Progress] = []
    with edgedec.load(model, runtime="cpu", cache_dir=tmp_path, on_progress=told.append):
        pass
    assert [phase for phase in phases(told) if phase not in ("tiles", "verify", "wait")] == [
        "choosing a runtime",
        "planning the memory",
        "load",
        "checking how long drafts with the bits of single steps may be",
        "measuring",
    ]
    last = {(progress.phase, progress.detail): progress for progress in told}
    assert [progress for progress in last.values() if progress.done != progress.total] == []
    measured = [progress.done for progress in told if progress.phase == "measuring" and progress.unit == "%"]
    assert measured == sorted(measured)
    assert len(measured) > 3


@pytest.mark.slow
def test_comparing_two_runtimes_is_told(model: Path, tmp_path: Path) -> None:
    """The first load of a model compares two runtimes, and says so."""
    told: list[Progress] = []
    choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path, on_progress=told.append), measure=True)
    compared = [(one.done, one.total) for one in told if one.detail == "cpu with llamacpp"]
    assert compared == [(0, None), (1, 1)]
    told.clear()
    choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path, on_progress=told.append), measure=True)
    assert told == []


def test_text_that_is_not_shown_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --json nothing of the text is shown while it is made, so its tokens are counted; a pipe gets plain lines."""
    monkeypatch.setattr("edgedec_apps.cli.shown.progress._LINE_PATIENCE_S", 0.0)
    result = run_here("run", model, "Hello", "-n", "10", "-t", "0", "--ignore-end", "--json")
    assert json.loads(result.out)["stats"]["n_generated_tokens"] == 10
    assert "generating: 5 of 10 tokens\n" in result.err
    assert "\x1b" not in result.err
    shown = run_here("run", model, "Hello", "-n", "10", "-t", "0", "--ignore-end")
    assert "generating" not in shown.err


@pytest.mark.slow
def test_a_benchmark_speaks_from_its_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a prompt is measured, bench tells what it does; each run counts, and a pipe gets plain lines."""
    monkeypatch.setattr("edgedec_apps.cli.shown.progress._LINE_PATIENCE_S", 0.0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "task": "chat", "turns": ["Hello"]}) + "\n", encoding="utf-8")
    result = run_here("bench", model, "--prompts", prompts, "-n", "4")
    assert result.code == 0
    told = [line for line in result.err.splitlines() if ":" in line]
    starts = ("warming up", "measuring the prompts:")
    places = [next(i for i, line in enumerate(told) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert [line for line in told if line.startswith("measuring the prompts: 2 of 15 runs (at most ")]
    assert "\x1b" not in result.err
