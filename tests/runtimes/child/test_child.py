"""A model in a child process: it passes the conformance suite, and either process outlives the other's end."""

import _thread
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from support.conformance.runtime import check_runtime
from support.models.tiny_models import tiny_llama
from support.processes.hosted import child_of_a_killed_parent, hosted

from edgedec.errors import CancelledError, RequestError, RuntimeLostError, RuntimeUnavailableError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import Session
from edgedec.progress import CancelToken, Progress
from edgedec.testing import raise_failures
from edgedec_runtimes.child import process
from edgedec_runtimes.child.model import ChildModel

pytestmark = pytest.mark.slow

N_CTX = 2048
TEXT = np.arange(3, 23, dtype=np.int32)
LONG = np.resize(np.arange(3, 200, dtype=np.int32), N_CTX - 1)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("child") / "tiny.gguf", n_embd=32, n_ff=48, n_ctx_train=N_CTX)


@pytest.fixture
def model(path: Path) -> Iterator[ChildModel]:
    """The model on the reference runtime in a child."""
    with hosted(path, LoadOptions(n_ctx=N_CTX)) as loaded:
        yield loaded


def test_the_conformance_suite_passes(path: Path) -> None:
    """Everything that the reference runtime can do is done in the child as in this process."""
    results = check_runtime(lambda: hosted(path, LoadOptions(n_ctx=128, n_parallel=3)))
    raise_failures(results)
    skipped = [result.name for result in results if result.status == "skipped"]
    assert set(skipped) <= {"undeclared_capabilities_raise", "memory_is_as_planned", "cancel_stops_a_forward"}


def test_a_lost_child_is_started_again(model: ChildModel) -> None:
    """After its end a call says so, the session is empty, and the same forward gives the same bits again."""
    session = model.session(64)
    expected = session.forward(TEXT, n_past=0).logits.copy()
    assert session.n_cached == len(TEXT)
    assert model.child is not None
    os.kill(model.child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeLostError, match=r"(?s)was lost \(it was ended by SIGKILL.*ask again"):
        _again_and_again(session, TEXT)  # the first forward may still find the process there
    assert session.n_cached == 0
    other = model.session(64)
    other.forward(TEXT, n_past=0)
    assert model.child is not None
    _kill_and_wait(model)
    with pytest.raises(RuntimeLostError, match="read the text again"):
        other.forward(TEXT[:1], n_past=len(TEXT))
    assert np.array_equal(session.forward(TEXT, n_past=0).logits, expected)
    session.close()
    with pytest.raises(SessionError):
        session.forward(TEXT, n_past=0)


def test_the_child_ends_with_its_parent(path: Path) -> None:
    """A parent that is killed leaves no process behind."""
    pid = child_of_a_killed_parent(path)
    deadline = time.monotonic() + 20
    while _runs(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.02)


def test_closing_ends_the_child(model: ChildModel) -> None:
    """close() waits for the process; a closed model refuses everything."""
    assert model.child is not None
    pid = model.child.pid
    model.close()
    assert not _runs(pid)
    with pytest.raises(SessionError, match="closed"):
        model.session(8)
    with pytest.raises(SessionError, match="closed"):
        model.tokenizer.encode("a")


def test_ctrl_c_and_cancel_stop_a_forward(model: ChildModel) -> None:
    """Either ends a forward in the child; what was completed counts, and the session goes on from there."""
    session = model.session(N_CTX)
    threading.Timer(0.2, _thread.interrupt_main).start()
    with pytest.raises(KeyboardInterrupt):
        _again_and_again(session, LONG)
    threading.Timer(0.2, session.cancel).start()
    with pytest.raises(CancelledError):
        _again_and_again(session, LONG)
    n = session.n_cached
    found = session.forward(LONG[n : n + 1], n_past=n).logits.copy()
    fresh = model.session(N_CTX)
    assert np.array_equal(fresh.forward(LONG[: n + 1], n_past=0).logits, found)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that hangs is waited for half a second."""
    monkeypatch.setattr(process, "PATIENCE_S", 0.5)
    monkeypatch.setattr(process, "_CANCEL_S", 0.5)


def _stop(model: ChildModel) -> int:
    assert model.child is not None
    os.kill(model.child.pid, signal.SIGSTOP)
    return model.child.pid


@pytest.mark.usefixtures("impatient")
def test_a_child_that_hangs_is_ended(model: ChildModel) -> None:
    """A forward that is cancelled, or interrupted by Ctrl-C, comes back; the next one has a process of its own."""
    session = model.session(N_CTX)
    expected = session.forward(TEXT, n_past=0).logits.copy()
    for interrupt, kind in ((session.cancel, RuntimeLostError), (_thread.interrupt_main, KeyboardInterrupt)):
        pid = _stop(model)
        threading.Timer(0.1, interrupt).start()
        with pytest.raises(kind):
            session.forward(TEXT, n_past=0)
        assert not _runs(pid)
        assert np.array_equal(session.forward(TEXT, n_past=0).logits, expected)


@pytest.mark.usefixtures("impatient")
def test_closing_ends_a_child_that_hangs(path: Path) -> None:
    """Whether it hangs before close(), in a forward of another thread, or does not even take what it is sent."""
    for ask in (None, "forward", "load"):
        model = hosted(path, LoadOptions(n_ctx=N_CTX))
        session = model.session(N_CTX)
        pid = _stop(model)
        raised: list[BaseException] = []

        def work(ask: str = str(ask), session: Session = session, raised: list[BaseException] = raised) -> None:
            try:
                session.forward(TEXT, n_past=0) if ask == "forward" else session.load(bytes(1 << 20), 1)
            except RuntimeLostError as error:
                raised.append(error)

        worker = threading.Thread(target=work)
        if ask is not None:
            worker.start()
            time.sleep(0.1)
            session.cancel()
            worker.join(20)
            assert len(raised) == 1, ask
        model.close()
        assert not _runs(pid)


@pytest.mark.usefixtures("impatient")
def test_a_loading_that_hangs_is_cancelled(path: Path) -> None:
    """A cancelled loading ends, also where the process does nothing any more."""
    cancel = CancelToken()

    before = _children()

    def hang() -> None:
        # Before a child runs a program of its own, this process waits for it: stopped then, both would hang.
        while not (
            found := [pid for pid in _children() if pid not in before and _program(pid) != _program(os.getpid())]
        ):
            time.sleep(0.01)
        os.kill(found[0], signal.SIGSTOP)
        time.sleep(0.1)
        cancel.cancel()

    hanging = threading.Thread(target=hang)
    hanging.start()
    with pytest.raises(CancelledError):
        hosted(path, LoadOptions(n_ctx=64, cancel=cancel))
    hanging.join(20)
    assert _children() == before


def _program(pid: int) -> bytes:
    """Return the command line of a process; nothing where it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def _children() -> list[int]:
    """Return the processes that this one has started and that run."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"PPid:\t{os.getpid()}\n" in (entry / "status").read_text():
                found.append(int(entry.name))
    return sorted(found)


def test_what_a_callback_raises_is_raised(model: ChildModel, path: Path) -> None:
    """An exception of the application's callback passes through both processes; so does a cancelled loading."""

    def fail(_progress: Progress) -> None:
        raise ZeroDivisionError("the application's")

    with pytest.raises(ZeroDivisionError, match="the application's"):
        model.session(64).forward(TEXT, n_past=0, on_progress=fail)
    cancel = CancelToken()
    cancel.cancel()
    with pytest.raises(CancelledError):
        hosted(path, LoadOptions(n_ctx=64, cancel=cancel))


def test_errors_of_the_child_are_raised(model: ChildModel) -> None:
    """One of edgedec's comes as it was raised (tests/test_errors.py); another exception is a defect, which is named."""
    with pytest.raises(RequestError, match="lone surrogate"):
        model.tokenizer.encode("\ud800")
    with pytest.raises(RuntimeUnavailableError, match="the model's process failed: TypeError"):
        model.tokenizer.encode(3)  # type: ignore[arg-type]


def _again_and_again(session: Session, tokens: NDArray[np.int32]) -> None:
    while True:
        session.forward(tokens, n_past=0)


def _kill_and_wait(model: ChildModel) -> None:
    """End the child, and wait until the parent knows."""
    child = model.child
    assert child is not None
    os.kill(child.pid, signal.SIGKILL)
    while child.ending is None:
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    """Return whether a process runs: a zombie, which nobody has waited for, has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
