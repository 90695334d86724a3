"""Ctrl-C and SIGTERM at every stage: what there is so far is kept, and no traceback and no half files are left."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
from support.processes.command_line import (
    ENDLESS,
    TOO_LONG,
    finish,
    interrupt_when,
    run_here,
    start,
    start_shell,
    wait_for_reader,
)

from edgedec.progress import CancelToken
from edgedec_apps.cli.interrupts import TerminatedError, interruptible

pytestmark = [pytest.mark.slow, pytest.mark.skipif(os.name != "posix", reason="POSIX signals and FIFOs")]

STOPPING = "edgedec: stopping; Ctrl-C again ends at once"  # what a busy machine may say


@pytest.fixture
def fifo(tmp_path: Path) -> Path:
    """A pipe that nobody writes into."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def first_text(process: "subprocess.Popen[bytes]") -> bytes:
    """Wait for the first text of a generation."""
    assert process.stdout is not None
    text = os.read(process.stdout.fileno(), 1000)
    assert text
    return text


def test_an_interrupted_generation_keeps_its_text(model: Path) -> None:
    """Ctrl-C during the generation ends it with its text, a summary and exit code 130."""
    process = start("run", model, "Hello", *ENDLESS)
    first = first_text(process)
    process.send_signal(signal.SIGINT)
    result = finish(process)
    assert result.code == 130
    assert (first + result.out).endswith(b"\n")
    begun, note, summary, last = (line for line in result.err.splitlines() if line != STOPPING)
    assert begun == f"loading {model}"
    assert note == f"edgedec: {TOO_LONG}"
    assert "(cancelled)" in summary
    assert last == "edgedec: interrupted"


@pytest.mark.parametrize(("runtime", "n_characters"), [("reference", 5000), ("llamacpp", 50_000)])
def test_an_interrupted_prefill_ends_without_text(
    model: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, n_characters: int
) -> None:
    """Ctrl-C in the middle of a long prompt ends with a summary of no tokens, and JSON says the same."""
    interrupt_when(monkeypatch, lambda progress: progress.phase == "prefill")
    result = run_here("run", model, "x" * n_characters, *ENDLESS, "--runtime", runtime, "--draft", "off", "--json")
    assert result.code == 130
    document = json.loads(result.out)
    assert (document["text"], document["finish_reason"]) == ("", "cancelled")
    summary = f"0 tokens (cancelled) · {TOO_LONG}"
    assert result.err == f"edgedec: {TOO_LONG}\n{summary}\nedgedec: interrupted\n"


def test_an_interrupted_load_ends_without_a_report(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while llama.cpp loads is a CancelledError that names the file."""
    interrupt_when(monkeypatch, lambda progress: progress.phase == "load")
    run_here("run", model, "Hello", "--runtime", "llamacpp").failed(130, "loading tiny.gguf: cancelled")


def test_json_holds_what_was_generated_before_ctrl_c(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves the text so far on standard output and one whole object in --json-out."""
    written: list[str] = []

    def write_text(text: str) -> None:
        written.append(text)
        if len(written) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("edgedec_apps.cli.shown.replies.write_text", write_text)
    file = tmp_path / "a.json"
    assert run_here("run", model, "Hello", *ENDLESS, "--json-out", file).code == 130
    assert written[-1] == "\n"
    assert json.loads(file.read_text())["text"] == "".join(written[:-1])
    assert [path.name for path in tmp_path.glob("a.json*")] == ["a.json"]


def test_ctrl_c_while_the_prompt_is_read(model: Path, fifo: Path) -> None:
    """Ctrl-C while the prompt comes from a pipe that gives nothing ends with 130."""
    process = start("run", model, "-f", fifo)
    other_end = wait_for_reader(fifo)
    time.sleep(0.5)  # a signal in the microseconds between opening and reading is seen by Python after the read only
    while process.poll() is None:  # where half a second was too little for these, the next one comes while it reads
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(20)
    result = finish(process)
    os.close(other_end)
    result.failed(130, "interrupted")


def test_a_pipe_beside_a_prompt_that_never_ends_is_said(model: Path) -> None:
    """A prompt with a pipe that stays open waits for it, and says so; a line that comes late is in the prompt."""
    read, write = os.pipe()
    process = start("run", model, "Hello", "-n", "1", "-t", "0", "--json", stdin=read)
    os.close(read)
    assert process.stderr is not None
    assert b"reading standard input" in process.stderr.readline()
    os.write(write, b"late\n")
    os.close(write)
    result = finish(process)
    n_prompt_tokens = json.loads(result.out)["stats"]["n_prompt_tokens"]
    assert (result.code, n_prompt_tokens) == (0, 1 + len("<user>late\n\nHello</><assistant>"))


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_second_signal_ends_what_does_not_stop(model: Path, fifo: Path, number: int, code: int) -> None:
    """Work that hangs is told once that it stops; the next Ctrl-C or SIGTERM ends the process with its own code."""
    process = start("run", model, "Hello", "--chat-template", fifo)
    other_end = wait_for_reader(fifo)
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    assert b"Ctrl-C again" in process.stderr.readline()
    process.send_signal(number)
    result = finish(process)
    os.close(other_end)
    assert (result.code, result.out, result.err) == (code, b"", "")


def test_sigterm_leaves_no_half_files(model: Path, tmp_path: Path) -> None:
    """SIGTERM ends the generation with 143; beside what is whole there is no file."""
    folder = tmp_path / "out"
    folder.mkdir()
    process = start("run", model, "Hello", *ENDLESS, "--json-out", folder / "a.json")
    first_text(process)
    process.send_signal(signal.SIGTERM)
    result = finish(process)
    assert result.code == 143
    assert result.err.splitlines()[-1] == "edgedec: terminated"
    assert {path.name for path in folder.iterdir()} <= {"a.json"}


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_a_signal_during_a_load_ends_with_its_own_code(model: Path, fifo: Path, name: str, code: int) -> None:
    """A load that a signal cancels ends with 128 and the signal's number, whatever the load itself raises."""
    if signal.getsignal(signal.Signals[name]) is signal.SIG_IGN:
        pytest.skip(f"{name} is ignored here, as under nohup, and edgedec leaves it so")
    process = start("run", model, "Hello", "--chat-template", fifo)
    other_end = wait_for_reader(fifo)
    process.send_signal(signal.Signals[name])
    os.close(other_end)  # the load goes on with an empty template, and sees that it was cancelled
    result = finish(process)
    assert result.code == code
    assert result.err.splitlines()[-1] == "edgedec: terminated"


def test_an_ignored_ctrl_c_stays_ignored(model: Path, fifo: Path) -> None:
    """A job of a script that ignores Ctrl-C, as background jobs do, runs to its end."""
    process = start_shell('trap "" INT; exec "$@"', "run", model, "-f", fifo, "-n", "2", "-q")
    other_end = wait_for_reader(fifo)
    process.send_signal(signal.SIGINT)
    os.write(other_end, b"Hello")
    os.close(other_end)
    result = finish(process)
    assert (result.code, result.err) == (0, "")


def test_a_doubled_signal_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """`timeout` sends SIGTERM twice, at once; work that ends with its results is not killed by the second."""
    monkeypatch.setattr("edgedec_apps.cli.interrupts.os._exit", lambda code: pytest.fail(f"killed with {code}"))
    told: list[bool] = []

    def work(cancel: CancelToken) -> None:
        main = threading.main_thread().ident
        assert main is not None
        for _ in range(2):
            signal.pthread_kill(main, signal.SIGTERM)
            while not cancel.cancelled:
                pass
        told.append(cancel.cancelled)

    with pytest.raises(TerminatedError):
        interruptible(work)
    assert told == [True]


def test_handlers_are_restored(model: Path) -> None:
    """After a command in this process the handlers of signals are those from before."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert run_here("run", model, "Hello", "-n", "2").code == 0
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


def test_ctrl_c_within_code_made_from_a_text(tmp_path: Path) -> None:
    """As dataclasses run it when they are imported: the exit code is 130 nevertheless, also of `python -m`."""
    (tmp_path / "interrupted.py").write_text(
        "import edgedec_apps.cli.app as app, edgedec_apps.cli as cli\n"
        "app.run_app = lambda: exec('raise KeyboardInterrupt')\n"
        "cli.main()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.run([sys.executable, "-m", "interrupted"], capture_output=True, text=True, env=environment)
    assert (run.returncode, run.stderr) == (130, "edgedec: interrupted\n")
