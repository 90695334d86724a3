"""What a session may be asked and what it holds afterwards, the same for all runtimes that keep their own KV cache.

A session has a SessionState in its attribute `state`; a model has a Stop, and runs one forward at a time:

    checked = check_items(items, model, shape)   # everything is looked at before anything is evaluated
    with stop.running([item.session for item in items]):
        state.begin(checked[0])                  # what lies beyond n_past is dropped
        stop.check(); ...; state.advance(n)      # n more rows of a chain are evaluated, as often as it takes
        stop.check(); ...; state.become_branched()  # or all rows of a tree

Between two of these calls anything may be raised: the session holds the rows counted so far, and no others.
"""

import ctypes
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.counted import counted
from edgedec.errors import CancelledError, CapabilityError, ContextFullError, RequestError, SessionError
from edgedec.model import Capabilities, ForwardItem, LayerSet, Rows, Session

_SET = int.from_bytes(b"\1\0\0\0", sys.byteorder)


class ModelLock:
    """A reentrant lock around whatever touches native state, which a forked child does not wait for.

    A thread of the parent may have held it at the fork, and that thread is not in the child; so a child enters at
    once, and has to be refused by `check_process`.
    """

    def __init__(self) -> None:
        """Begin unlocked, of this process."""
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __enter__(self) -> None:
        """Wait for other threads."""
        if self.is_ours:
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        """Let other threads in."""
        if self.is_ours:
            self._lock.release()

    @property
    def is_ours(self) -> bool:
        """Whether this is the process that loaded the model."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise SessionError in a forked child."""
        if not self.is_ours:
            raise SessionError("the model was loaded before fork(); a child process must load its own")


class Stop:
    """What ends a model's forward early: the sessions that are in it, and whether one of them was cancelled.

    Attributes:
        flag: 0, and another number from a cancel() to the end of the forward: for native code, which may read it as
            an int32 or as a C string of length 0 or 1. It stays at its address.
    """

    def __init__(self) -> None:
        """Begin without a forward."""
        self.flag = ctypes.c_int32(0)
        self._cancelled = False  # what the flag says, for Python
        self._running: tuple[Session, ...] = ()
        self._lock = threading.RLock()  # a signal handler may cancel, in the thread that holds it

    @contextmanager
    def running(self, sessions: Sequence[Session]) -> Iterator[None]:
        """Run a forward of these sessions, during which cancel() counts.

        A forward that is started by another one's progress callback stops together with that one.
        """
        outer = self._running
        try:
            self.enter(sessions)
            yield
        finally:
            self.leave(outer)

    def enter(self, sessions: Sequence[Session]) -> tuple[Session, ...]:
        """Begin what running() does; return what leave() needs at the end, whatever happens in between."""
        outer = self._running
        with self._lock:
            self._running = (*outer, *sessions)
        return outer

    def leave(self, outer: tuple[Session, ...]) -> None:
        """End what running() does."""
        with self._lock:
            self._running = outer
            if self._cancelled and not outer:
                self.flag.value, self._cancelled = 0, False

    def cancel(self, session: Session) -> None:
        """Stop the forward that the session is in, from any thread; without one, nothing happens."""
        with self._lock:
            if any(running is session for running in self._running):
                self.flag.value, self._cancelled = _SET, True

    def check(self) -> None:
        """Raise CancelledError when the forward that is running was cancelled."""
        if self.flag.value:
            n_cached = " and ".join(str(session.n_cached) for session in self._running)
            raise CancelledError(f"the forward was cancelled; {n_cached} tokens are cached")


@dataclass(frozen=True, slots=True)
class Shape:
    """What a request is checked against; `max_rows` is the most rows of logits of one forward."""

    n_vocab: int
    n_embd: int
    n_layer: int
    max_rows: int


@dataclass(frozen=True, slots=True)
class Checked:
    """A request that is in order.

    Attributes:
        tokens: int32[n], or None when hidden is given.
        hidden: f32[n, n_embd], or None.
        n_rows: n.
        first_layer: The layer to begin with.
        parents: int32[n] for a tree, None for a chain.
        wanted: int32, ascending indices of the rows whose logits are asked for.
    """

    n_past: int
    tokens: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None
    n_rows: int
    first_layer: int
    parents: NDArray[np.int32] | None
    layers: LayerSet | None
    wanted: NDArray[np.int32]
    taps: tuple[int, ...]


class SessionState:
    """How many tokens a session holds, which layers hold them, and the tree it was left with.

    Attributes:
        n_ctx: Slots.
        n_cached: Tokens cached; the token at position i lies in slot i, and row j of a tree in slot n_cached + j.
        written: bool[n_layer, n_ctx], whether a slot holds keys and values of the rows that were counted.
    """

    def __init__(self, n_ctx: int, n_layer: int) -> None:
        """Begin empty."""
        self.n_ctx = n_ctx
        self.n_cached = 0
        self.written = np.zeros((n_ctx, n_layer), dtype=np.bool_).T  # a slot's layers lie together: a step writes them
        self._n_written = 0  # no layer has written a slot from here on
        self._n_whole = 0  # every layer has written all slots up to here: there `written` need not be looked at
        self._closed = False
        self._current: Checked | None = None
        self._tree: Checked | None = None

    @property
    def is_branched(self) -> bool:
        """Whether the last forward was a tree of which no path was kept."""
        return self._tree is not None

    def check_open(self) -> None:
        """Raise SessionError once the session is closed."""
        if self._closed:
            raise SessionError("the session is closed; open another with model.session()")

    def check_settled(self, what: str) -> None:
        """Raise SessionError when the session is closed or branched; `what` is what can't be done then ("forked")."""
        self.check_open()
        if self.is_branched:
            raise SessionError(f"a branched session can't be {what}; call keep first")

    def begin(self, checked: Checked) -> None:
        """Begin a forward: drop what lies beyond n_past.

        A forward resumed mid-stack completes rows whose lower layers an earlier forward evaluated: their keys and
        values in those layers stay.
        """
        n_past, end, first = checked.n_past, checked.n_past + checked.n_rows, checked.first_layer
        self.n_cached, self._tree, self._current = n_past, None, checked
        self.written[first:, n_past : self._n_written] = False
        self.written[:, end : self._n_written] = False
        self._n_written = min(self._n_written, end if first else n_past)
        self._n_whole = min(self._n_whole, n_past)

    def advance(self, n: int) -> None:
        """Count the next `n` rows of the chain that is evaluated as cached."""
        self._write(self.n_cached, self.n_cached + n)
        self.n_cached += n

    @property
    def is_whole(self) -> bool:
        """Whether every layer holds every token, so that nothing need be looked up before one more is evaluated."""
        return self._n_whole >= self.n_cached and not self._closed

    def begin_step(self, n_past: int) -> None:
        """begin() of one token through all layers of a whole session."""
        self.n_cached, self._tree, self._current = n_past, None, None
        self._n_whole = n_past
        if n_past < self._n_written:
            self.written[:, n_past : self._n_written] = False
            self._n_written = n_past

    def advance_step(self) -> None:
        """advance(1) after begin_step()."""
        self.written[:, self.n_cached] = True
        self.n_cached += 1
        self._n_written = self._n_whole = self.n_cached

    def become_branched(self) -> None:
        """Count the rows of the tree that was evaluated: a path of them may be kept."""
        current = self._current
        assert current is not None, "no forward was begun"
        self._write(current.n_past, current.n_past + current.n_rows)
        self._tree = current

    def _write(self, start: int, stop: int) -> None:
        current = self._current
        assert current is not None, "no forward was begun"
        layers = True if current.layers is None else current.layers.attn[current.first_layer :, None]
        self.written[current.first_layer :, start:stop] = layers
        self._n_written = max(self._n_written, stop)
        if self._n_whole >= start and self.written[:, start:stop].all():
            self._n_whole = stop

    def leave_tree(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Drop the tree and return the slots, int32[n], that its path `rows` lies in.

        The caller moves their keys and values to the slots from n_cached on, then calls hold_path().

        Raises:
            SessionError: There is no tree.
            RequestError: `rows` is no path from the root. Nothing has changed.
        """
        self.check_open()
        if self._tree is None or self._tree.parents is None:
            raise SessionError("keep() follows a forward with parents; there was none, or a path was kept already")
        path, parents = np.asarray(rows).tolist(), self._tree.parents.tolist()
        for previous, row in zip([-1, *path], path, strict=False):
            if not isinstance(row, int) or not 0 <= row < len(parents) or parents[row] != previous:
                raise RequestError(f"rows {path} are no path from the root of the last tree")
        self._tree = None
        return self.n_cached + np.array(path, dtype=np.int32)

    def hold_path(self, slots: NDArray[np.int32]) -> None:
        """Count what was moved from `slots` as cached."""
        stop = self.n_cached + len(slots)
        self.written[:, self.n_cached : stop] = self.written[:, slots]
        self.written[:, stop : self._n_written] = False
        self.n_cached = self._n_written = stop
        self._n_whole = min(self._n_whole, stop)

    def restore(self, n_tokens: int, written: NDArray[np.bool_]) -> None:
        """Hold `n_tokens` tokens of which bool[n_layer, n_tokens] says where they were written."""
        self.n_cached, self._tree = 0, None
        self.written[:, :n_tokens] = written
        self.written[:, n_tokens:] = False
        self.n_cached = self._n_written = n_tokens
        self._n_whole = int(np.logical_and.accumulate(written.all(axis=0)).sum())

    def close(self) -> None:
        """Hold nothing any more, and be refused from now on."""
        self._closed, self.n_cached, self._tree, self._current = True, 0, None, None

    def check_written(self, checked: Checked) -> None:
        """Refuse to read keys and values that no forward has written."""
        if self._n_whole >= checked.n_past:
            return
        for i in range(checked.first_layer, len(self.written)):
            holes = np.flatnonzero(~self.written[i, : checked.n_past])
            if len(holes) and (checked.layers is None or checked.layers.attn[i]):
                raise SessionError(
                    f"layer {i} has no keys and values at position {holes[0]}: the forward that put this token there "
                    f"left the layer out; go back to n_past {holes[0]} or leave it out again"
                )


def check_step(tokens: NDArray[np.int32], n_past: int, state: SessionState, shape: Shape) -> None:
    """Check a forward of one token, int32[1], through all layers; as check_items()."""
    if not 0 <= tokens[0] < shape.n_vocab:
        raise RequestError(f"a token id is outside the vocabulary of {shape.n_vocab}")
    _check_past(n_past, 1, state)


def require_capable(items: Sequence[ForwardItem], capabilities: Capabilities, runtime: str) -> None:
    """Raise CapabilityError where an item asks for what is not declared."""
    for item in items:
        asked = {
            "trees": item.parents is not None,
            "layers": item.layers is not None,
            "taps": bool(item.taps),
            "hidden_input": item.hidden is not None,
        }
        for name, is_asked in asked.items():
            if is_asked:
                capabilities.require(name, runtime)


def check_items(items: Sequence[ForwardItem], model: object, shape: Shape) -> list[Checked]:
    """Check the items of a forward; their sessions are this model's and have a SessionState in `state`.

    Raises:
        ContextFullError, SessionError, RequestError, CapabilityError: As Session.forward; nothing has changed.
    """
    if not all(item.session.model is model for item in items):
        raise SessionError("a forward was given a session of another model")
    if len({id(item.session) for item in items}) != len(items):
        raise RequestError("a session stands twice in one forward")
    checked = [_check_item(item, shape) for item in items]
    if sum(len(c.wanted) for c in checked) > shape.max_rows:
        raise CapabilityError(f"the items ask for over {shape.max_rows} rows of logits; a forward returns at most that")
    return checked


def _check_item(item: ForwardItem, shape: Shape) -> Checked:
    session: Any = item.session
    state: SessionState = session.state
    state.check_open()
    if (item.tokens is None) == (item.hidden is None) or (item.hidden is None) != (item.resume_after is None):
        raise RequestError("a forward takes either tokens, or hidden together with resume_after")
    tokens = None if item.tokens is None else _tokens(item.tokens, shape)
    hidden = None if item.hidden is None else _hidden(item.hidden, item.resume_after, shape)
    n = len(tokens) if tokens is not None else len(hidden) if hidden is not None else 0
    _check_past(item.n_past, n, state)
    first_layer = 0 if item.resume_after is None else item.resume_after + 1
    if not all(first_layer <= tap < shape.n_layer for tap in item.taps):
        raise RequestError(f"taps are {item.taps}; they must be layers that run, {first_layer} to {shape.n_layer - 1}")
    checked = Checked(
        n_past=item.n_past,
        tokens=tokens,
        hidden=hidden,
        n_rows=n,
        first_layer=first_layer,
        parents=_parents(item.parents, n),
        layers=_layers(item.layers, shape.n_layer),
        wanted=_wanted(item.rows, n),
        taps=tuple(item.taps),
    )
    state.check_written(checked)
    if len(checked.wanted) > shape.max_rows:
        raise CapabilityError(
            f"{len(checked.wanted)} rows of logits were asked for; a forward returns at most {shape.max_rows}"
        )
    return checked


def _wanted(rows: Rows, n: int) -> NDArray[np.int32]:
    """Return the indices that "all", "last" or an array of rows stands for."""
    if isinstance(rows, str):
        if rows not in ("all", "last"):
            raise RequestError(f"rows is {rows!r}; it must be 'all', 'last' or row numbers")
        return np.arange(0 if rows == "all" else n - 1, n, dtype=np.int32)
    wanted = np.asarray(rows)
    is_rows = wanted.ndim == 1 and (wanted.dtype.kind in "iu" or not len(wanted))
    if not is_rows or np.any((wanted < 0) | (wanted >= n)) or np.any(np.diff(wanted) <= 0):
        raise RequestError(f"rows must be ascending row numbers from 0 to {n - 1}, found {wanted.tolist()}")
    return np.ascontiguousarray(wanted, dtype=np.int32)


def _tokens(given: NDArray[np.int32], shape: Shape) -> NDArray[np.int32]:
    tokens = np.asarray(given)
    if tokens.ndim != 1 or not len(tokens) or tokens.dtype.kind not in "iu":
        raise RequestError(f"tokens are {tokens.dtype}{list(tokens.shape)}; they must be a row of at least one id")
    if int(tokens.min()) < 0 or int(tokens.max()) >= shape.n_vocab:
        raise RequestError(f"a token id is outside the vocabulary of {shape.n_vocab}")
    return np.ascontiguousarray(tokens, dtype=np.int32)


def _hidden(given: NDArray[np.float32], resume_after: int | None, shape: Shape) -> NDArray[np.float32]:
    hidden = np.ascontiguousarray(given, dtype=np.float32)
    if hidden.ndim != 2 or hidden.shape[1] != shape.n_embd or not len(hidden):
        raise RequestError(f"hidden has the shape {hidden.shape}; it must be (rows from 1, {shape.n_embd})")
    if resume_after not in range(shape.n_layer):
        raise RequestError(f"resume_after is {resume_after}; it must be 0 to {shape.n_layer - 1}")
    return hidden


def _check_past(n_past: int, n: int, state: SessionState) -> None:
    if n_past < 0:
        raise RequestError(f"n_past is {n_past}; it must be from 0")
    if n_past > state.n_cached:
        branched = " (the last forward was a tree: call keep, or go back)" if state.is_branched else ""
        raise SessionError(f"n_past is {n_past}; the session holds {counted(state.n_cached, 'token')}{branched}")
    if n_past + n > state.n_ctx:
        raise ContextFullError(
            f"{counted(n_past, 'cached token')} and {n} new are over the session's {state.n_ctx}; open a longer one"
        )


def _parents(given: NDArray[np.int32] | None, n: int) -> NDArray[np.int32] | None:
    if given is None:
        return None
    parents = np.asarray(given)
    is_rows = parents.shape == (n,) and parents.dtype.kind in "iu"
    if not is_rows or not np.all((parents >= -1) & (parents < np.arange(n))):
        raise RequestError(f"parents must be {n} row numbers, each -1 or below its own row, found {parents.tolist()}")
    return np.ascontiguousarray(parents, dtype=np.int32)


def _layers(layers: LayerSet | None, n_layer: int) -> LayerSet | None:
    if layers is not None and (layers.attn.shape != (n_layer,) or layers.mlp.shape != (n_layer,)):
        raise RequestError(f"layers must hold {n_layer} switches each, found {layers.attn.shape}, {layers.mlp.shape}")
    return layers
