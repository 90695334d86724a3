"""Nothing is silent for long: a terminal shows what takes time and how far it is, a pipe a line at the beginning."""

import io
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from support.processes.command_line import PATIENCE_S, Terminal, run_here

import edgedec
from edgedec.load_options import LoadOptions
from edgedec.loading.runtime_choice import choose_runtime
from edgedec.progress import Progress, stage
from edgedec_apps.cli.shown.progress import ProgressLine


@contextmanager
def lines_at_once(monkeypatch: pytest.MonkeyPatch, *, every_s: float = 1000.0) -> Iterator[io.StringIO]:
    """Show work on a pipe from its beginning on, and yield what is written to standard error."""
    monkeypatch.setattr(ProgressLine, "said_at", -math.inf)
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
    """A line when it is begun, and now and then how long it has taken; none when it is over."""
    with (
        lines_at_once(monkeypatch, every_s=0.0) as err,
        ProgressLine() as report,
        stage(report, "measuring", "a thing"),
    ):
        wait_until(lambda: err.getvalue().count("measuring a thing: 0 s so far\n") > 2)
    first, *others = err.getvalue().splitlines()
    assert first == "measuring a thing"
    assert {*others} == {"measuring a thing: 0 s so far"}


@pytest.mark.parametrize(
    ("what", "every_s", "expected"),
    [
        ("", 1000.0, ["download m.gguf: 0 of 98 MB"]),
        ("loading m", 1000.0, ["loading m"]),
        (
            "loading m",
            0.0,
            ["loading m", "download m.gguf: 49 of 98 MB", "measuring: 0 of 2 runs", "measuring: 1 of 2 runs"],
        ),
    ],
)
def test_a_pipe_gets_one_line_at_the_beginning(
    monkeypatch: pytest.MonkeyPatch, what: str, every_s: float, expected: list[str]
) -> None:
    """Whatever a command does one after another, in as many `with` blocks; then a line now and then in long work."""
    with lines_at_once(monkeypatch, every_s=every_s) as err:
        with ProgressLine(what) as report:
            for done in (0, 49_000_000, 98_000_000):
                report(Progress("download", done, 98_000_000, "bytes", "m.gguf"))
        with ProgressLine("another name") as report:
            for done in range(3):
                report(Progress("measuring", done, 2, "runs"))
    assert err.getvalue().splitlines() == expected


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals")
@pytest.mark.parametrize("kind", ["file", "pipe"])
def test_a_file_gets_the_text_and_the_terminal_the_progress(model: Path, tmp_path: Path, kind: str) -> None:
    """While a text goes to a file, the terminal counts its tokens; what reads a pipe may write to the same terminal."""
    read, write = os.pipe()
    with (tmp_path / "text").open("wb") as file:
        args = ("run", model, "Hello", "-n", "1900", "-t", "0", "--method=ignore-end", "--runtime", "reference")
        with Terminal(*args, stdout=file if kind == "file" else write) as person:
            assert person.end() == 0
    os.close(write)
    text = (tmp_path / "text").read_bytes() if kind == "file" else os.read(read, 65536)
    os.close(read)
    assert text == run_here(*args).out
    assert (b"generating" in person.shown) == (kind == "file")
    assert b"1900 tokens (length)" in person.shown


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
def test_comparing_two_runtimes_is_told(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first load on a machine compares two runtimes, where nobody knows which is faster, and says so."""
    monkeypatch.setattr("edgedec_runtimes.cpu.runtime.Cpu.is_fastest", False)
    told: list[Progress] = []
    choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path, on_progress=told.append), measure=True)
    compared = [(one.done, one.total) for one in told if one.detail == "cpu with llamacpp"]
    assert compared == [(0, None), (1, 1)]
    told.clear()
    choose_runtime(model, "auto", LoadOptions(cache_dir=tmp_path, on_progress=told.append), measure=True)
    assert told == []


def test_text_that_is_not_shown_is_counted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With --json nothing of the text is shown while it is made, so its tokens are counted; a pipe gets plain lines."""
    args = ("run", model, "Hello", "-n", "10", "-t", "0", "--method=ignore-end")
    begun, *_, summary = run_here(*args, tells_progress=True).err.splitlines()
    assert begun == f"loading {model}"
    assert "10 tokens (length)" in summary
    for name in ("_LINE_PATIENCE_S", "_LINE_EVERY_S"):
        monkeypatch.setattr(f"edgedec_apps.cli.shown.progress.{name}", 0.0)
    result = run_here(*args, "--json", tells_progress=True)
    assert json.loads(result.out)["stats"]["n_generated_tokens"] == 10
    assert "generating: 5 of 10 tokens\n" in result.err
    assert "\x1b" not in result.err
    assert "generating" not in run_here(*args, tells_progress=True).err


@pytest.mark.slow
def test_a_benchmark_speaks_from_its_start(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a prompt is measured, bench tells what it does; each run counts, and a pipe gets plain lines."""
    monkeypatch.setattr("edgedec_apps.cli.shown.progress._LINE_PATIENCE_S", 0.0)
    monkeypatch.setattr("edgedec_apps.cli.shown.progress._LINE_EVERY_S", 0.0)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "task": "chat", "turns": ["Hello"]}) + "\n", encoding="utf-8")
    result = run_here("bench", model, "--prompts", prompts, "-n", "4", tells_progress=True)
    assert result.code == 0
    told = result.err.splitlines()
    starts = ("warming up", "measuring the prompts:")
    places = [next(i for i, line in enumerate(told) if line.startswith(start)) for start in starts]
    assert places == sorted(places)
    assert [line for line in told if line.startswith("measuring the prompts: 2 of 15 runs (at most ")]
    assert "\x1b" not in result.err
