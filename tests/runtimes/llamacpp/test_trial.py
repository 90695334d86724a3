"""A library that would end this process ends another one first, and a person reads why."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgedec
from edgedec import processor
from edgedec.errors import RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec_runtimes.llamacpp import library, loading, runtime, tiny_run, trial
from edgedec_runtimes.llamacpp.binding import Release
from edgedec_runtimes.llamacpp.options import llamacpp_options

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _untried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forget what was tried, before and after."""
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path / "cache"))
    trial.outcome.cache_clear()
    library.llama.cache_clear()
    yield
    trial.outcome.cache_clear()
    library.llama.cache_clear()


def test_the_tiny_model_runs(tmp_path: Path) -> None:
    """llama.cpp takes every step of a forward with it, and its logits are nearly the reference's."""
    off = tiny_run.run_tiny_model(library.llama(), tmp_path, repack=trial.repack_complaint() is None)
    assert 0 < off < 0.001


def test_a_library_that_runs_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next process reads that it ran; another processor tries it again."""
    assert trial.complaint() is None
    monkeypatch.setattr(trial, "tried", lambda *_: trial.Outcome("it was tried again"))
    trial.outcome.cache_clear()
    assert trial.complaint() is None
    monkeypatch.setattr(processor, "cpu_name", lambda: "another")
    trial.outcome.cache_clear()
    assert trial.complaint() == "it was tried again"


def test_where_memory_is_short_nothing_is_tried_and_nothing_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that tries the library would be ended, or end this one; it is tried once there is room."""
    monkeypatch.setattr(trial, "tried", lambda *_: trial.Outcome("it was tried"))
    for free, found in ((129_999_999, None), (130_000_000, "it was tried")):
        monkeypatch.setattr(trial, "available_bytes", lambda free=free: free)
        trial.outcome.cache_clear()
        assert trial.complaint() == found


@pytest.mark.parametrize("crash", [signal.SIGSEGV, signal.SIGILL, signal.SIGABRT])
def test_a_crash_is_a_message(crash: signal.Signals, monkeypatch: pytest.MonkeyPatch, tiny_path: Path) -> None:
    """A process that is really ended by a signal, as an unfit library ends it; `auto` takes another runtime."""
    code = f"import os, signal; signal.signal({int(crash)}, signal.SIG_DFL); os.kill(os.getpid(), {int(crash)})"
    real = subprocess.run

    def run(command: list[str], **options: object) -> object:
        return real([command[0], "-c", code], **options)  # type: ignore[call-overload]

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(RuntimeUnavailableError, match=rf"process that tried it \({crash.name}\).*--runtime cpu"):
        library.llama()
    with pytest.raises(RuntimeUnavailableError, match=crash.name):
        edgedec.load(tiny_path, runtime="llamacpp")
    with edgedec.load(tiny_path) as model:
        assert len(model.generate("a", max_tokens=3, ignore_end=True).token_ids) == 3


def test_a_crash_with_rearranged_weights_leaves_them_as_they_are(
    monkeypatch: pytest.MonkeyPatch, tiny_path: Path
) -> None:
    """Only kernels for rearranged weights end the process: models run without them, and the next process knows."""
    tried: list[tuple[str, ...]] = []

    def crash(_release: Release, *arguments: str) -> trial.Outcome:
        tried.append(arguments)
        return trial.Outcome(None if arguments else "it ended (SIGSEGV)")

    monkeypatch.setattr(trial, "tried", crash)
    for _ in range(2):
        trial.outcome.cache_clear()
        assert (trial.repack_complaint(), trial.complaint()) == ("it ended (SIGSEGV)", None)
    assert tried == [(), ("plain",)]
    options = LoadOptions()
    assert llamacpp_options(options).repack
    assert not llamacpp_options(loading.checked_options(options)).repack
    assert "weights are not rearranged" in runtime.LlamaCpp().report().notes[-1]
    with edgedec.load(tiny_path, runtime="llamacpp") as model:
        assert len(model.generate("a", max_tokens=3, ignore_end=True).token_ids) == 3


def test_a_library_that_hangs_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may wait for ever."""
    monkeypatch.setattr(trial, "_PATIENCE_S", 0.001)
    with pytest.raises(RuntimeUnavailableError, match=r"did not run a tiny model within 0.001 s"):
        library.llama()


def test_a_library_that_does_not_import_tells_its_own_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception of Python's comes again in this process, with its text; it is no crash."""
    assert trial.ending(1) is None
    assert trial.ending(0) is None
    assert trial.ending(0xC000001D) == "it ended the process that tried it (exit status 0xc000001d)"
