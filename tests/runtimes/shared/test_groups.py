"""Groups of rows that pass different layers in one forward: each row has the bits that its group has alone.

Then, what sessions hold between two calls, and who may use a model.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.forwards import evaluated
from support.models.tiny_models import N_VOCAB, tiny_llama
from support.models.tiny_quantized import Tiny, write_tiny
from support.models.tiny_runs import bits

from edgedec.errors import CancelledError, CapabilityError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, LayerSet, Model, RowGroup, Session, Span
from edgedec.progress import Progress
from edgedec.sessions.joined_work import owned
from edgedec_runtimes.cpu.runtime import Cpu
from edgedec_runtimes.llamacpp.runtime import LlamaCpp
from edgedec_runtimes.reference.runtime import Reference
from edgedec_runtimes.shared.library_model import ModelLock

N_LAYER, MIDDLE, BEFORE, LOW = 4, 2, 9, 5
TOKENS = np.random.default_rng(3).integers(4, 260, 300).astype(np.int32)
LOWER, UPPER = Span(leave=MIDDLE), Span(enter=MIDDLE)
END = BEFORE + LOW


@dataclass(frozen=True)
class Case:
    """A model, and what leaves its middle layer for LOW tokens behind the first BEFORE: f32[LOW, n_embd]."""

    model: Model
    vectors: NDArray[np.float32]

    def begun(self) -> Session:
        """Return a session that holds the lower layers' part of these tokens."""
        session = self.model.session(320)
        session.forward(TOKENS[:BEFORE], n_past=0)
        lower(session)
        return session

    def whole(self, n: int, **options: object) -> Forward:
        """Return a forward of the first `n` tokens."""
        return owned(self.model.session(320).forward(TOKENS[:n], n_past=0, rows="all", **options))  # type: ignore[arg-type]


def lower(session: Session) -> Forward:
    """Evaluate LOW tokens in the lower layers."""
    group = RowGroup(TOKENS[BEFORE:END], span=LOWER)
    return evaluated(session, BEFORE, group, rows=np.empty(0, np.int32), taps=(MIDDLE - 1,))


@pytest.fixture(scope="module", params=["reference", "cpu", "cpu on 3 threads"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    """A tiny model on each runtime that takes several groups."""
    tiny = Tiny(n_layer=N_LAYER, n_head=8, n_head_kv=4, head_dim=32)
    path = write_tiny(tmp_path_factory.mktemp("groups") / "m.gguf", tiny)
    runtime = Reference() if request.param == "reference" else Cpu()
    with runtime.load(path, LoadOptions(n_ctx=320, n_threads=3 if "3" in request.param else 1, max_rows=256)) as model:
        session = model.session(320)
        session.forward(TOKENS[:BEFORE], n_past=0)
        yield Case(model, lower(session).hidden[MIDDLE - 1].copy())


def same(found: NDArray[np.float32], expected: NDArray[np.float32]) -> None:
    np.testing.assert_array_equal(bits(found), bits(expected))


def test_rows_that_enter_in_the_middle_beside_rows_that_pass_all(case: Case) -> None:
    """Drafts are completed while the next tokens begin; the step behind them has its bits, and so have the taps."""
    expected = case.whole(END + 4, taps=(MIDDLE, N_LAYER - 1))
    alone, together = case.begun(), case.begun()
    entering, behind = RowGroup(vectors=case.vectors, span=UPPER), RowGroup(TOKENS[END : END + 3])
    first = evaluated(alone, BEFORE, entering, rows="all").logits.copy()
    second = evaluated(alone, END, behind, rows="all").logits.copy()
    found = evaluated(together, BEFORE, entering, behind, rows="all", taps=(1, MIDDLE, N_LAYER - 1))
    same(found.logits, np.concatenate([first, second]))
    same(found.logits, expected.logits[BEFORE : END + 3])
    same(found.hidden[1][:LOW], case.vectors)  # what they enter with
    for tap in (MIDDLE, N_LAYER - 1):
        same(found.hidden[tap], expected.hidden[tap][BEFORE : END + 3])
    assert together.n_cached == END + 3
    same(together.forward(TOKENS[END + 3 : END + 4], n_past=END + 3).logits, expected.logits[-1:])


def test_rows_that_pass_all_before_rows_that_enter_in_the_middle(case: Case) -> None:
    """The slots of those that enter keep their lower layers; the logits of some rows are wanted."""
    session, expected = case.begun(), case.whole(END)
    groups = RowGroup(TOKENS[BEFORE : BEFORE + 2]), RowGroup(vectors=case.vectors[2:], span=UPPER)
    found = evaluated(session, BEFORE, *groups, rows=np.array([1, 2, 4], np.int32)).logits
    same(found, expected.logits[[BEFORE + 1, BEFORE + 2, BEFORE + 4]])
    same(session.forward(TOKENS[END - 1 : END], n_past=END - 1).logits, expected.logits[-1:])


def test_rows_that_leave_early_or_leave_layers_out_beside_others(case: Case) -> None:
    """The next drafts' lower layers while drafts are completed; what they leave out is not there to be read."""
    session, alone = case.begun(), case.begun()
    entering = RowGroup(vectors=case.vectors, span=UPPER)
    for span in (LOWER, Span(layers=LayerSet.of(N_LAYER, [0, 2, 3]))):
        leaving = RowGroup(TOKENS[END : END + 3], span=span)
        found = evaluated(session, BEFORE, entering, leaving, rows="all").logits.copy()
        same(found[:LOW], evaluated(alone, BEFORE, entering, rows="all").logits)
        same(found[LOW:], evaluated(alone, END, leaving, rows="all").logits)
        with pytest.raises(SessionError, match=f"no keys and values at position {END}"):
            session.forward(TOKENS[:1], n_past=END + 3)
        lower(session), lower(alone)


def test_a_tree_over_groups(case: Case) -> None:
    """Nodes that pass all layers hang below those that enter in the middle; a path over both is kept."""
    session, expected = case.begun(), case.whole(END + 2)
    entering = RowGroup(vectors=case.vectors, span=UPPER)
    tree = RowGroup(TOKENS[[0, END, 1, END + 1]], sees=np.array([1, LOW - 1, LOW, LOW + 1], np.int32))
    found = evaluated(session, BEFORE, entering, tree, rows="all").logits
    same(found[[*range(LOW), LOW + 1, LOW + 3]], expected.logits[BEFORE:])
    session.keep(np.array([*range(LOW), LOW + 1, LOW + 3], np.int32))
    assert session.n_cached == END + 2
    same(session.forward(TOKENS[END + 1 : END + 2], n_past=END + 1).logits, expected.logits[-1:])


@pytest.mark.slow
def test_beside_other_sessions_and_in_parts(case: Case) -> None:
    """More rows than one native forward takes, of two sessions."""
    session, other, n = case.begun(), case.model.session(320), 290 - END
    groups = (RowGroup(vectors=case.vectors, span=UPPER), RowGroup(TOKENS[END : END + n]))
    items = [ForwardItem(session, BEFORE, groups), ForwardItem(other, 0, (RowGroup(TOKENS[:7]),), rows="all")]
    found = case.model.forward(items)
    same(found[0].logits, case.model.session(320).forward(TOKENS[:290], n_past=0).logits)
    same(found[1].logits, case.whole(7).logits)


def test_rows_that_nobody_has_begun_are_not_read(case: Case) -> None:
    """A group behind rows whose lower layers no forward has evaluated is refused, and the session is as it was."""
    session = case.model.session(320)
    session.forward(TOKENS[:BEFORE], n_past=0)
    groups = RowGroup(vectors=case.vectors, span=UPPER), RowGroup(TOKENS[:2])
    with pytest.raises(SessionError, match=f"layer 0 has no keys and values at position {BEFORE}"):
        evaluated(session, BEFORE, *groups)
    assert session.n_cached == BEFORE
    expected = case.whole(END).logits[BEFORE:]
    same(session.forward(TOKENS[BEFORE:END], n_past=BEFORE, rows="all").logits, expected)


@pytest.mark.slow
def test_a_runtime_without_groups_says_so(tmp_path: Path) -> None:
    """On llama.cpp, by the capability's name; nothing is evaluated."""
    path = write_tiny(tmp_path / "m.gguf", Tiny())
    with LlamaCpp().load(path, LoadOptions(n_ctx=64)) as model:
        session = model.session(64)
        with pytest.raises(CapabilityError, match="'groups'"):
            evaluated(session, 0, RowGroup(TOKENS[:2]), RowGroup(TOKENS[2:3]))
        assert session.n_cached == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny model of two layers."""
    path = tiny_llama(tmp_path_factory.mktemp("bookkeeping") / "tiny.gguf", n_embd=32, n_ff=48)
    with Reference().load(path, LoadOptions(n_ctx=64)) as loaded:
        yield loaded


def tokens(n: int) -> NDArray[np.int32]:
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
