"""Forwards of several threads joined: everybody gets the bits of being alone, faults stay with whom they belong to."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.models.tiny_models import tiny_llama

from edgedec.errors import CancelledError, ContextFullError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import Forward, ForwardItem, Model
from edgedec.sessions.batching import LONE_PIECE_ROWS, PIECE_ROWS, BatchedSession, Batcher
from edgedec_runtimes.cpu.runtime import Cpu

N_CTX = 128
Ids = NDArray[np.int32]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """A tiny llama on the cpu runtime."""
    path = tiny_llama(tmp_path_factory.mktemp("batching") / "tiny.gguf")
    with Cpu().load(path, LoadOptions(n_threads=1)) as loaded:
        yield loaded


class Counted:
    """A model that notes how many items each forward has, and may be made to wait in one.

    Attributes:
        sizes: Items of each forward so far.
        rows: Tokens of each forward so far.
        gate: Forwards go on when it is set.
        inside: Set while a forward waits at the gate.
    """

    def __init__(self, model: Model, *, invariant: bool = True) -> None:
        self._model = model
        self.batch_invariant: bool | int = True if invariant else 1
        self.sizes: list[int] = []
        self.rows: list[int] = []
        self.gate, self.inside = threading.Event(), threading.Event()
        self.gate.set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Note and evaluate."""
        self.sizes.append(len(items))
        self.rows.append(sum(item.n_rows for item in items))
        self.inside.set()
        assert self.gate.wait(30)
        return self._model.forward(items)


class Watched(Batcher):
    """A batcher that knows how many of the sessions that it opened wait for something, for a forward that runs too."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.opened: list[BatchedSession] = []

    def session(self, n_ctx: int) -> BatchedSession:
        """Open a session."""
        self.opened.append(super().session(n_ctx))
        return self.opened[-1]

    @property
    def n_waiting(self) -> int:
        """How many of the sessions wait."""
        return sum(session.ticket is not None for session in self.opened)


@pytest.fixture
def counted(model: Model) -> Counted:
    """The model, whose forwards are noted."""
    return Counted(model)


@pytest.fixture
def shared(counted: Counted) -> Watched:
    """A batcher of it."""
    return Watched(counted)


Waiting = tuple[ThreadPoolExecutor, Future[Forward]]


@contextmanager
def at_the_gate(counted: Counted, session: BatchedSession) -> Iterator[Waiting]:
    """Let a session's forward wait at the gate; yield threads for what comes behind it, and that forward's result."""
    counted.gate.clear()
    counted.inside.clear()
    with ThreadPoolExecutor(8) as pool:
        first = pool.submit(session.forward, prompt(0, 2), n_past=0)
        assert counted.inside.wait(30)
        yield pool, first


def wait_for(shared: Watched, n: int) -> None:
    """Wait until so many forwards are asked for."""
    while shared.n_waiting < n:
        threading.Event().wait(0.001)


def prompt(seed: int, n: int) -> Ids:
    """Return some tokens."""
    return np.random.default_rng(seed).integers(1, 250, n).astype(np.int32)


def decoded(session: Any, ids: Ids, n_steps: int) -> list[NDArray[np.float32]]:
    """Read a prompt and go on greedily; return the row of logits of every step."""
    rows, n_past, tokens = [], 0, ids
    with session.generating(1) if isinstance(session, BatchedSession) else nullcontext():
        for _ in range(n_steps):
            rows.append(session.forward(tokens, n_past=n_past).logits[0].copy())
            n_past += len(tokens)
            tokens = np.array([rows[-1].argmax()], np.int32)
    return rows


def alone(model: Model, ids: Ids, n_steps: int) -> list[NDArray[np.float32]]:
    """Return what a session without company gives."""
    session = model.session(N_CTX)
    try:
        return decoded(session, ids, n_steps)
    finally:
        session.close()


def at_once(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """Run calls in threads of their own; return their results, or what they raised."""

    def caught(call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(60) for future in [pool.submit(caught, call) for call in calls]]


def test_everybody_gets_the_bits_of_being_alone(model: Model, counted: Counted, shared: Watched) -> None:
    """Four sequences of different lengths in four threads: every row equals that of the sequence by itself."""
    prompts = [prompt(i, n) for i, n in enumerate((3, 20, PIECE_ROWS * 2 + 5, 1))]
    sessions = [shared.session(N_CTX) for _ in prompts]
    counted.gate.clear()

    def open_the_gate() -> None:
        wait_for(shared, len(sessions))
        counted.gate.set()

    calls = [partial(decoded, s, p, 20) for s, p in zip(sessions, prompts, strict=True)]
    *found, _ = at_once([*calls, open_the_gate])
    for rows, ids in zip(found, prompts, strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(rows, alone(model, ids, 20), strict=True))
    assert max(counted.sizes) > 1
    for session in sessions:
        session.close()


def test_a_forward_waits_for_those_that_are_due(counted: Counted, shared: Watched) -> None:
    """What two threads ask for while a forward runs is one forward afterwards."""
    sessions = [shared.session(N_CTX) for _ in range(3)]
    with at_the_gate(counted, sessions[0]) as (pool, first):
        others = [pool.submit(session.forward, prompt(0, 2), n_past=0) for session in sessions[1:]]
        wait_for(shared, 3)
        counted.gate.set()
        results = [future.result(30) for future in (first, *others)]
    assert counted.sizes == [1, 2]
    assert all(np.array_equal(result.logits, results[0].logits) for result in results)


def test_results_outlive_the_next_forward(model: Model) -> None:
    """Logits are the caller's own, as another thread's forward may come at any time."""
    shared = Watched(model)
    one, other = shared.session(N_CTX), shared.session(N_CTX)
    rows = one.forward(prompt(1, 4), n_past=0).logits
    before = rows.copy()
    other.forward(prompt(2, 4), n_past=0)
    assert np.array_equal(rows, before)


def test_a_refused_item_does_not_hurt_the_others(model: Model, counted: Counted, shared: Watched) -> None:
    """A token outside the vocabulary and a full context are refused; the third thread's row is right."""
    good, bad, full = shared.session(N_CTX), shared.session(N_CTX), shared.session(8)
    with at_the_gate(counted, shared.session(N_CTX)) as (pool, first):
        futures = [
            pool.submit(good.forward, prompt(1, 4), n_past=0),
            pool.submit(bad.forward, np.array([1 << 30], np.int32), n_past=0),
            pool.submit(full.forward, prompt(1, 9), n_past=0),
        ]
        wait_for(shared, 4)
        counted.gate.set()
        first.result(30)
        assert np.array_equal(futures[0].result(30).logits[0], alone(model, prompt(1, 4), 1)[0])
        with pytest.raises(RequestError):
            futures[1].result(30)
        with pytest.raises(ContextFullError):
            futures[2].result(30)
    assert (bad.n_cached, full.n_cached, good.n_cached) == (0, 0, 4)


def test_a_long_prompt_is_refused_before_any_piece_of_it_is_read(model: Model) -> None:
    """A prompt of pieces that is too long for the context leaves the session empty."""
    shared = Watched(model)
    session, other = shared.session(PIECE_ROWS + 8), shared.session(N_CTX)
    with other.generating(1), session.generating(1), pytest.raises(ContextFullError):
        session.forward(prompt(1, 2 * PIECE_ROWS), n_past=0)
    with pytest.raises(RequestError, match="no group of rows"):
        session.evaluate(ForwardItem(session, 0, ()))
    assert session.n_cached == 0


def test_one_that_does_not_come_is_waited_for_once(model: Model) -> None:
    """A generation that makes no forwards leaves those that do alone, after one wait; back again it is due again."""
    shared = Watched(model)
    slow, quick = shared.session(N_CTX), shared.session(N_CTX)
    with slow.generating(1), quick.generating(1):
        assert shared.n_due == 2
        quick.forward(prompt(1, 4), n_past=0)
        assert shared.n_due == 1
        slow.forward(prompt(1, 4), n_past=0)
        assert shared.n_due >= 1
        assert shared.piece_rows(quick) == PIECE_ROWS  # as the slow one is due
    assert shared.n_due == 0


def test_cancelling_what_waits(model: Model, counted: Counted, shared: Watched) -> None:
    """A forward that has not begun is given up; the one that runs and the session itself are as before."""
    running, waiting = shared.session(N_CTX), shared.session(N_CTX)
    with at_the_gate(counted, running) as (pool, first):
        second = pool.submit(waiting.forward, prompt(1, 4), n_past=0)
        wait_for(shared, 2)
        waiting.cancel()
        with pytest.raises(CancelledError):
            second.result(30)
        counted.gate.set()
        assert np.array_equal(first.result(30).logits[0], alone(model, prompt(0, 2), 1)[0])
    assert (waiting.n_cached, counted.sizes) == (0, [1])
    waiting.cancel()  # without a forward nothing happens
    assert waiting.forward(prompt(1, 4), n_past=0).logits.shape[0] == 1


def test_forwards_whose_rows_depend_on_each_other_are_not_joined(model: Model) -> None:
    """On a model that is not batch-invariant each thread has forwards of its own."""
    counted = Counted(model, invariant=False)
    shared = Watched(counted)
    sessions = [shared.session(N_CTX) for _ in range(3)]
    found = at_once([partial(decoded, s, prompt(i, 5), 6) for i, s in enumerate(sessions)])
    for i, rows in enumerate(found):
        assert all(np.array_equal(a, b) for a, b in zip(rows, alone(model, prompt(i, 5), 6), strict=True))
    assert set(counted.sizes) == {1}


def test_trees_forks_and_saved_caches_go_through(model: Model) -> None:
    """keep, fork, save and load are the runtime's own."""
    shared = Watched(model)
    session = shared.session(N_CTX)
    session.forward(prompt(1, 4), n_past=0)
    tree = session.forward(np.array([5, 6, 7], np.int32), n_past=4, parents=np.array([-1, 0, 0], np.int32), rows="all")
    assert tree.logits.shape[0] == 3
    session.keep(np.array([0, 2], np.int32))
    assert session.n_cached == 6
    fork, other = session.fork(), shared.session(N_CTX)
    other.load(session.save(), 6)
    step = np.array([9], np.int32)
    rows = [each.forward(step, n_past=6).logits for each in (session, fork, other)]
    assert all(np.array_equal(rows[0], row) for row in rows)


def test_what_a_forward_that_was_given_up_would_have_dropped_is_gone(counted: Counted, shared: Watched) -> None:
    """A session of an older text whose next prompt is cancelled before it was read holds what both share, no more."""
    running, session = shared.session(N_CTX), shared.session(N_CTX)
    session.forward(prompt(1, 12), n_past=0)
    with at_the_gate(counted, running) as (pool, first):
        second = pool.submit(session.forward, prompt(2, 20), n_past=3)
        wait_for(shared, 2)
        session.cancel()
        with pytest.raises(CancelledError):
            second.result(30)
        counted.gate.set()
        first.result(30)
    assert session.n_cached == session.fork().n_cached == 3
    with pytest.raises(SessionError, match="cancelled"):
        session.save()
    session.forward(prompt(2, 20), n_past=3)
    assert session.n_cached == 23
    assert session.save()


@pytest.mark.skipif(sys.platform == "win32", reason="sends a signal to a thread")
def test_one_that_is_interrupted_while_it_waits_leaves_the_queue(
    model: Model, counted: Counted, shared: Watched
) -> None:
    """Ctrl-C in a thread that waits for its forward: the others' go on, and its session is as before."""
    leader, waiting, behind = (shared.session(N_CTX) for _ in range(3))

    def interrupt() -> None:
        wait_for(shared, 2)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    with at_the_gate(counted, leader) as (pool, first):
        pool.submit(interrupt)
        with pytest.raises(KeyboardInterrupt):
            waiting.forward(prompt(1, 4), n_past=0)
        later = pool.submit(behind.forward, prompt(2, 4), n_past=0)
        wait_for(shared, 2)
        counted.gate.set()
        first.result(30)
        assert np.array_equal(later.result(30).logits[0], alone(model, prompt(2, 4), 1)[0])
    assert (waiting.n_cached, waiting.ticket, shared.n_waiting) == (0, None, 0)
    assert np.array_equal(waiting.forward(prompt(1, 4), n_past=0).logits[0], alone(model, prompt(1, 4), 1)[0])


def test_an_interrupted_forward_begins_again_for_the_others(model: Model) -> None:
    """KeyboardInterrupt in the thread that evaluates is that thread's own; who shared its forward gets the rows."""

    class Interrupted(Counted):
        def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
            found = super().forward(items)
            if len(items) == 2:
                raise KeyboardInterrupt
            return found

    counted = Interrupted(model)
    shared = Watched(counted)
    sessions = [shared.session(N_CTX) for _ in range(3)]
    with at_the_gate(counted, sessions[0]) as (pool, first):
        second = pool.submit(sessions[1].forward, prompt(1, 4), n_past=0)
        wait_for(shared, 2)
        third = pool.submit(sessions[2].forward, prompt(2, 4), n_past=0)
        wait_for(shared, 3)
        counted.gate.set()
        first.result(30)
        assert isinstance(second.exception(30), KeyboardInterrupt)
        assert np.array_equal(third.result(30).logits[0], alone(model, prompt(2, 4), 1)[0])
    assert (counted.sizes, shared.n_waiting) == ([1, 2, 1], 0)


def test_a_tree_that_is_cancelled_while_it_is_shared_can_be_left(counted: Counted, shared: Watched) -> None:
    """Its rows come all the same, so that the session is not left branched: what it holds can be saved."""
    sessions = [shared.session(N_CTX) for _ in range(3)]
    sessions[1].forward(prompt(1, 4), n_past=0)
    tree = partial(sessions[1].forward, np.array([5, 6], np.int32), n_past=4, parents=np.array([-1, -1], np.int32))
    with at_the_gate(counted, sessions[0]) as (pool, _):
        second, third = pool.submit(tree), pool.submit(sessions[2].forward, prompt(2, 4), n_past=0)
        wait_for(shared, 3)
        counted.inside.clear()
        counted.gate.set()
        assert counted.inside.wait(30)
        sessions[1].cancel()
        third.result(30)
        if second.exception(30) is None:
            sessions[1].keep(np.array([1], np.int32))
    assert sessions[1].n_cached in (4, 5)
    assert sessions[1].save()


def test_a_prompt_is_cut_wherever_others_could_wait(counted: Counted, shared: Watched) -> None:
    """In small pieces while another one is due, though the session itself came late; in larger ones while none is."""
    late, quick, lone = shared.session(N_CTX), shared.session(N_CTX), shared.session(3 * LONE_PIECE_ROWS)
    with late.generating(1), quick.generating(1):
        quick.forward(prompt(1, 4), n_past=0)
        assert shared.piece_rows(quick) == LONE_PIECE_ROWS  # as the late one is not due
        late.forward(prompt(2, PIECE_ROWS + 1), n_past=0)
    lone.forward(prompt(3, 2 * LONE_PIECE_ROWS), n_past=0)
    assert counted.rows == [4, PIECE_ROWS, 1, LONE_PIECE_ROWS, LONE_PIECE_ROWS]


def test_prompts_are_not_cut_where_rows_depend_on_each_other(model: Model) -> None:
    """A prompt is one forward, as it would be alone."""
    counted = Counted(model, invariant=False)
    shared = Watched(counted)
    session, other = shared.session(N_CTX), shared.session(N_CTX)
    with session.generating(1), other.generating(1):
        session.forward(prompt(1, 2 * PIECE_ROWS), n_past=0)
    assert counted.rows == [2 * PIECE_ROWS]


def test_no_more_is_joined_than_one_forward_may_return(counted: Counted, shared: Watched) -> None:
    """Three items of 100 rows of logits where a forward returns 256: two and one, nothing twice."""
    sessions = [shared.session(N_CTX) for _ in range(4)]
    with at_the_gate(counted, sessions[0]) as (pool, first):
        futures = [first]
        futures += [pool.submit(s.forward, prompt(1, 100), n_past=0, rows="all") for s in sessions[1:]]
        wait_for(shared, 4)
        counted.gate.set()
        assert [len(future.result(30).logits) for future in futures] == [1, 100, 100, 100]
    assert counted.sizes == [1, 2, 1]


class Drafting:
    """A call of a head: implements edgedec.head_state.DraftCall.

    Args:
        log: Gets how many calls are answered together, each time.
        fails: Whether the call can't be answered.
    """

    n_rows = 1

    def __init__(self, log: list[str], kind: str = "chains", *, fails: bool = False) -> None:
        self.kind = kind
        self.log = log
        self.fails = fails

    def answer(self, others: Sequence[Any]) -> None:
        """Note the calls, or fail."""
        if any(call.fails for call in (self, *others)):
            raise SessionError("a session is closed")
        self.log.append(f"{1 + len(others)} {self.kind}")


def test_drafts_are_joined_and_come_before_forwards(counted: Counted, shared: Watched) -> None:
    """What waits behind a forward: calls of one kind are answered at once, each kind by itself, then the forwards."""
    log: list[str] = []
    sessions = [shared.session(N_CTX) for _ in range(7)]
    with at_the_gate(counted, sessions[0]) as (pool, _):
        forwards = [pool.submit(s.forward, prompt(1, 4), n_past=0) for s in sessions[1:3]]
        wait_for(shared, 3)
        kinds = ("chains", "scores", "chains", "chains")
        drafts = [pool.submit(shared.answer, [(s, Drafting(log, k))]) for s, k in zip(sessions[3:], kinds, strict=True)]
        wait_for(shared, 7)
        sessions[3].cancel()  # a draft is not worth it
        counted.gate.set()
        n_together = sorted(draft.result(30)[0].n_items for draft in drafts)
        rows = [future.result(30).logits for future in forwards]
    assert sorted(log) == ["1 scores", "3 chains"]
    assert n_together == [1, 3, 3, 3]
    assert counted.sizes == [1, 2]
    assert np.array_equal(rows[0], rows[1])


def test_a_draft_that_fails_fails_alone(counted: Counted, shared: Watched) -> None:
    """Of three calls that come together one can't be answered: the others are, each by itself."""
    log: list[str] = []
    sessions = [shared.session(N_CTX) for _ in range(4)]
    with at_the_gate(counted, sessions[0]) as (pool, _):
        calls = [Drafting(log, fails=i == 1) for i in range(3)]
        drafts = [pool.submit(shared.answer, [(s, call)]) for s, call in zip(sessions[1:], calls, strict=True)]
        wait_for(shared, 4)
        counted.gate.set()
        errors = [draft.exception(30) for draft in drafts]
    assert [type(error) for error in errors] == [type(None), SessionError, type(None)]
    assert log == ["1 chains", "1 chains"]


def test_a_session_that_drafts_is_waited_for(counted: Counted, shared: Watched) -> None:
    """A session that is due has its rows in the forward although it drafts first."""
    first, second = shared.session(N_CTX), shared.session(N_CTX)
    first.forward(prompt(1, 4), n_past=0)
    shared.last_s = 1000.0  # a long forward: the next one is waited for long
    log: list[str] = []
    with first.generating(1), second.generating(1), ThreadPoolExecutor(1) as threads:
        result = threads.submit(first.forward, prompt(1, 4), n_past=0)
        wait_for(shared, 1)
        shared.answer([(second, Drafting(log))])
        second.forward(prompt(1, 4), n_past=0)
        result.result(30)
    assert log == ["1 chains"]
    assert counted.sizes == [1, 2]
