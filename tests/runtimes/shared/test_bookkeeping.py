"""What sessions hold between two calls, and who may use a model, on the reference runtime."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.tiny_models import N_VOCAB, tiny_llama

from edgedec.errors import CancelledError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import LayerSet, Model, RowGroup, Span
from edgedec.progress import Progress
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.shared.model_lock import ModelLock


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model of two layers."""
    path = tiny_llama(tmp_path_factory.mktemp("bookkeeping") / "tiny.gguf", n_embd=32, n_ff=48)
    with Reference().load(path, LoadOptions(n_ctx=64)) as loaded:
        yield loaded


def tokens(n: int) -> NDArray[np.int32]:
    """Return n random token ids."""
    return np.random.default_rng(0).integers(0, N_VOCAB, n).astype(np.int32)


def test_rows_of_a_cancelled_forward_are_not_there_to_be_completed(model: Model) -> None:
    """Only rows that were evaluated hold the lower layers' keys; resuming more than those leaves holes."""
    hidden = model.session(8).forward(tokens(4), n_past=0, taps=(0,)).hidden[0]
    session = model.session(8)

    def cancel_at_2(progress: Progress) -> None:
        if progress.done == 2:
            session.cancel()

    with pytest.raises(CancelledError, match="2 tokens"):
        session.forward(tokens(4), n_past=0, on_progress=cancel_at_2)
    evaluated(session, 0, RowGroup(vectors=hidden, span=Span(enter=1)))
    with pytest.raises(SessionError, match="layer 0 has no keys and values at position 2"):
        session.forward(tokens(1), n_past=4)


@pytest.mark.parametrize("rows", [np.array([0.0]), np.array([2**32]), np.array([[0]])], ids=["float", "wide", "nested"])
def test_rows_are_row_numbers(model: Model, rows: NDArray[Any]) -> None:
    """What is no number of a row is refused as rows, as parents and as a path, and the tree is still there."""
    session = model.session(8)
    with pytest.raises(RequestError, match="rows must be"):
        session.forward(tokens(1), n_past=0, rows=rows)
    with pytest.raises(RequestError, match="parents must be"):
        session.forward(tokens(1), n_past=0, parents=rows)
    session.forward(tokens(1), n_past=0, parents=np.array([-1], np.int32))
    with pytest.raises(RequestError, match="no path"):
        session.keep(rows)
    session.keep(np.array([0], np.int32))
    assert session.n_cached == 1


def test_a_signal_may_cancel_while_the_forward_begins(model: Model) -> None:
    """cancel() from the thread that is in a forward, as from a handler of a signal, does not wait for itself."""
    session, done = model.session(8), threading.Event()

    def cancel(progress: Progress) -> None:
        with model.stop._lock:  # type: ignore[attr-defined]  # as it is at the beginning and the end
            session.cancel()
        done.set()

    with pytest.raises(CancelledError, match="1 tokens"):
        session.forward(tokens(3), n_past=0, on_progress=cancel)
    assert done.is_set()


def test_an_interrupted_forward_leaves_whole_rows(model: Model) -> None:
    """What a progress callback raises, Ctrl-C included, ends the forward with the rows evaluated so far."""
    session = model.session(16)

    def interrupt(progress: Progress) -> None:
        if progress.done == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.forward(tokens(9), n_past=0, on_progress=interrupt)
    assert session.n_cached == 4
    found = session.forward(tokens(9)[4:], n_past=4).logits
    assert np.array_equal(found, model.session(16).forward(tokens(9), n_past=0).logits)


def test_a_session_is_whole_again_when_its_holes_are_filled(model: Model) -> None:
    """After a part of the layers drafted and all of them verified, plain steps have nothing to look up any more."""
    session: Any = model.session(16)
    first_only = LayerSet(np.array([True, False]), np.array([True, False]))
    session.forward(tokens(3), n_past=0)
    assert session.state.n_whole == session.n_cached
    session.forward(tokens(2), n_past=3, layers=first_only)
    assert session.state.n_whole < session.n_cached
    with pytest.raises(SessionError, match="layer 1 has no keys and values at position 3"):
        session.forward(tokens(1), n_past=5)
    session.forward(tokens(1), n_past=3)
    assert session.state.n_whole == session.n_cached
    session.forward(tokens(1), n_past=4, layers=first_only)
    session.forward(tokens(3), n_past=4, parents=np.array([-1, 0, 0], np.int32))
    session.keep(np.array([0, 2], np.int32))
    assert session.state.n_whole == session.n_cached
    hidden = session.forward(tokens(2), n_past=6, layers=first_only, taps=(0,)).hidden[0]
    evaluated(session, 6, RowGroup(vectors=hidden, span=Span(enter=1)))  # the upper layers of the same rows
    assert session.state.n_whole == session.n_cached
    saved = session.save()
    session.forward(tokens(1), n_past=8, layers=first_only)
    session.load(session.save(), 9)
    assert session.state.n_whole < session.n_cached
    session.load(saved, 8)
    assert session.state.n_whole == session.n_cached


def test_a_lock_is_not_waited_for_in_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where another process made the lock, use is refused at once, whoever holds the lock."""
    lock, entered = ModelLock(), threading.Event()

    def enter() -> None:
        with lock:
            entered.set()

    with lock:
        thread = threading.Thread(target=enter)
        thread.start()
        assert not entered.wait(0.05)
    thread.join(60)
    assert entered.is_set()
    refused: list[str] = []

    def enter_in_child() -> None:
        try:
            enter()
        except SessionError as error:
            refused.append(str(error))

    with lock:
        monkeypatch.setattr(lock, "_pid", -1)
        thread = threading.Thread(target=enter_in_child)
        thread.start()
        thread.join(60)
        assert not lock.is_ours
        monkeypatch.undo()
    assert "before fork" in refused[0]


def test_a_lock_with_a_refusal_raises_it_and_stays_free() -> None:
    """Every later use gets an error of its own with the same message; closing still gets in, from any thread."""
    lock = ModelLock()
    lock.refusal = SessionError("the model is closed")
    for _ in range(2):
        with pytest.raises(SessionError, match="the model is closed"), lock:
            pass
    entered = threading.Event()

    def close() -> None:
        with lock.threads:
            entered.set()

    thread = threading.Thread(target=close)
    thread.start()
    thread.join(60)
    assert entered.is_set()
