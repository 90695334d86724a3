"""Checks of saving, cancelling and closing, and of the memory plan."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from edgedec.errors import CancelledError, EdgedecError, ModelFormatError, SessionError
from edgedec.model import Session
from edgedec.testing.results import NotApplicableError, require
from support.conformance.memory_reading import read_memory
from support.conformance.requirements import require_equal, require_raises
from support.conformance.subject import N_PREFIX, Subject, Tokens, chain, extend

_PATIENCE_S = 0.25
_MEMORY_SHARE, _MEMORY_BYTES = 0.05, 16_000_000


def saved_sessions_load(subject: Subject) -> None:
    """load() restores what save() returned in another session, bit for bit; other bytes raise ModelFormatError."""
    one = subject.tokens(1, seed=1)
    session = subject.prefixed()
    data = session.save()
    expected = extend(session, one)
    session.close()
    other = subject.session()
    other.forward(subject.tokens(5, seed=2), n_past=0)  # which load() replaces
    bad: tuple[tuple[str, bytes, int], ...] = (
        ("half of the bytes", data[: len(data) // 2], N_PREFIX),
        ("no bytes", b"", N_PREFIX),
        ("the bytes of another number of tokens", data, N_PREFIX - 1),
    )
    for what, damaged, n_tokens in bad:
        require_raises(ModelFormatError, f"load() of {what}", partial(other.load, damaged, n_tokens))
    other.load(data, N_PREFIX)
    require(other.n_cached == N_PREFIX, f"after load() n_cached is {other.n_cached}, expected {N_PREFIX}")
    require_equal(extend(other, one), expected, "the forward after load()")
    short = subject.session(N_PREFIX - 1)
    require_raises(EdgedecError, "load() into a session too short for it", partial(short.load, data, N_PREFIX))


@dataclass(slots=True)
class _Attempt:
    """The end of a forward that another thread tried to cancel."""

    cancelled: bool
    seconds: float
    n_calls: int


def _cancelled_forward(session: Session, tokens: Tokens) -> _Attempt:
    """Evaluate the tokens while another thread calls cancel() again and again."""
    over = threading.Event()
    attempt = _Attempt(cancelled=False, seconds=0.0, n_calls=0)

    def cancel_until_over() -> None:
        while not over.wait(0.0005):
            session.cancel()
            attempt.n_calls += 1

    thread = threading.Thread(target=cancel_until_over, daemon=True)
    thread.start()
    started = perf_counter()
    try:
        session.forward(tokens, n_past=0)
    except CancelledError:
        attempt.cancelled = True
    finally:
        attempt.seconds = perf_counter() - started
        over.set()
        thread.join()
    return attempt


def cancel_stops_a_forward(subject: Subject) -> None:
    """cancel() from another thread stops a long forward at the end of a chunk, and the session goes on from there."""
    chunk, n_train = subject.model.capabilities.prefill_chunk, subject.model.card.n_ctx_train
    n = max(subject.n_ctx, 2 * chunk + 1)
    n = min(n, n_train) if n_train > 0 else n
    tokens = subject.tokens(n)
    session = subject.session(n)
    attempt = _cancelled_forward(session, tokens[:-1])
    if not attempt.cancelled:
        stoppable = n >= 2 * chunk and attempt.n_calls > 10 and attempt.seconds > _PATIENCE_S
        require(not stoppable, f"{attempt.n_calls} calls of cancel() did not stop {n} rows in {attempt.seconds:.2f} s")
        raise NotApplicableError(f"{n} rows were over in {attempt.seconds * 1000:.0f} ms, before they could be stopped")
    n_cached = session.n_cached
    require(0 <= n_cached < n, f"n_cached is {n_cached} after a cancelled forward of {n - 1} rows")
    at_border = n_cached % chunk == 0 or n_cached == n - 1
    require(at_border, f"n_cached is {n_cached} after cancel(), expected a multiple of {chunk} (prefill_chunk)")
    found = session.forward(tokens[n_cached:], n_past=n_cached).logits.copy()
    session.close()
    fresh = subject.session(n)
    if n_cached:
        fresh.forward(tokens[:n_cached], n_past=0)
    require_equal(found, fresh.forward(tokens[n_cached:], n_past=n_cached).logits.copy(), "going on after cancel()")


def cancel_alone_is_nothing(subject: Subject) -> None:
    """cancel() without a forward running does nothing to the next one."""
    one = subject.tokens(1)
    expected = subject.replay(subject.prefix, one)
    session = subject.prefixed()
    session.cancel()
    require_equal(extend(session, one), expected, "the forward after cancel()")


def _require_closed(session: Session, what: str, one: Tokens, *, forks: bool) -> None:
    """Require that everything but closing a session raises SessionError."""
    calls: list[tuple[str, Callable[[], object]]] = [
        ("forward", lambda: session.forward(one, n_past=0)),
        ("keep", lambda: session.keep(chain(0))),
        ("save", lambda: session.save()),
        ("load", lambda: session.load(b"", 0)),
    ]
    if forks:
        calls.append(("fork", lambda: session.fork()))
    for name, call in calls:
        require_raises(SessionError, f"{name}() on {what}", call)


def closing_is_final(subject: Subject) -> None:
    """close() may be called again, closed sessions and models raise SessionError, a second load is the same model."""
    one = subject.tokens(1)
    with subject.load() as model:
        fingerprint, expected = model.card.fingerprint, subject.model.card.fingerprint
        require(fingerprint == expected, f"a second load has the fingerprint {fingerprint}, the first {expected}")
        session, other = model.session(subject.n_ctx), model.session(subject.n_ctx)
        session.forward(subject.prefix, n_past=0)
        session.close()
        session.close()
        session.cancel()
        _require_closed(session, "a closed session", one, forks=model.capabilities.fork)
        found = extend(other, subject.prefix[: model.capabilities.max_rows])
        alone = subject.replay(subject.prefix[: model.capabilities.max_rows])
        subject.require_same(found, alone, "another session after it", exact=subject.is_exact())
    model.close()
    _require_closed(other, "a session of a closed model", one, forks=model.capabilities.fork)
    require_raises(SessionError, "session() of a closed model", lambda: model.session(subject.n_ctx))
    model.close()
    other.close()


def memory_is_as_planned(subject: Subject) -> None:
    """memory() differs by at most 5 % or 16 MB from what a process of its own holds with one full session."""
    if subject.memory_probe is None:
        raise NotApplicableError("no memory probe was given")
    reading = read_memory(subject.memory_probe)
    if reading.resident_bytes is None:
        raise NotApplicableError("this system does not tell how much memory a process holds")
    held, off = reading.resident_bytes, abs(reading.planned_bytes - reading.resident_bytes)
    allowed = max(_MEMORY_BYTES, int(_MEMORY_SHARE * held))
    planned = f"memory() says {reading.planned_bytes / 1e6:.1f} MB"
    require(off <= allowed, f"{planned}, the process holds {held / 1e6:.1f} MB; allowed are {allowed / 1e6:.1f} MB")


CHECKS = (
    saved_sessions_load,
    cancel_stops_a_forward,
    cancel_alone_is_nothing,
    closing_is_final,
    memory_is_as_planned,
)
