"""The base of streams: one thread at a time reads, any thread may stop or close; a second reader gets an error."""

import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from edgedec.errors import SessionError
from edgedec.progress import CancelToken

_POLL_S = 0.05


def second_reader() -> SessionError:
    """Return the error for a stream that two readers read at the same time."""
    return SessionError(
        "this stream is being read already, by another thread or task or by a callback's caller; a stream has one "
        "reader at a time: give each reader a stream of its own, or pass the tokens on"
    )


@dataclass(eq=False, slots=True)
class Visit:
    """One stay of this thread inside a stream; `closes` says whether the thread is there to close the stream."""

    closes: bool = False
    thread: int = field(default_factory=threading.get_ident)


class OneReader:
    """Knows which thread is inside a stream, and lets no second one in.

    enter() and leave() stand in one `try ... finally` with the same visit, so that whatever ends the visit
    (KeyboardInterrupt too) also frees the stream; leave() does nothing for a visit that never began.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._n_waiting = 0
        self._visit: Visit | None = None
        self._afterwards: list[Callable[[], None]] = []

    @property
    def is_here(self) -> bool:
        """Whether this thread is inside: it was called back from there."""
        visit = self._visit
        return visit is not None and visit.thread == threading.get_ident()

    def enter(self, visit: Visit, stop: Callable[[], None] | None = None) -> None:
        """Begin a visit: a reader waits for a thread that closes the stream, a closing thread waits for anyone.

        A closing thread calls `stop` again and again, to ask the reader to leave. It must not be inside itself, as it
        would wait for ever.

        Raises:
            SessionError: Another reader is inside.
        """
        with self._lock:
            while (inside := self._visit) is not None:
                if not visit.closes and (not inside.closes or self.is_here):
                    raise second_reader()
                if stop is not None:
                    stop()
                self._n_waiting += 1
                self._changed.wait(_POLL_S)
                self._n_waiting -= 1
            self._visit = visit

    def leave(self, visit: Visit) -> None:
        """End a visit, and make the calls that afterwards() was given during it."""
        if self._visit is not visit:
            return
        with self._lock:
            calls, self._afterwards = self._afterwards, []
            self._visit = None
            if self._n_waiting:
                self._changed.notify_all()
        for call in calls:
            call()

    def afterwards(self, call: Callable[[], None]) -> None:
        """Have `call` called by the thread that is inside, as soon as it has left."""
        self._afterwards.append(call)


T = TypeVar("T")


class Stream(Iterator[T], Generic[T]):
    """Yields what a generator yields. Closing or dropping the stream closes the generator.

    One thread at a time reads a stream: a second one gets a SessionError. Closing the model ends the stream, also while
    the stream is paused.

    A subclass calls read_from() once. Its generator looks at `stop`, and ends soon when that is cancelled.

    Attributes:
        reader: Knows which thread is reading.
        stop: Cancelled to end this stream alone.
    """

    def __init__(self, cancel: CancelToken | None) -> None:
        """`cancel` also ends the stream; it may be shared with others."""
        self.reader = OneReader()
        self.stop = CancelToken()
        self._cancel = cancel

    def read_from(self, items: Generator[T]) -> None:
        """Yield what `items` yields."""
        self._items = items if self._cancel is None else _stopped_by(self._cancel, self.stop, items)

    def __next__(self) -> T:
        visit = Visit()
        try:
            self.reader.enter(visit)
            item = next(self._items)
            self._note(item)
            return item
        finally:
            self.reader.leave(visit)

    def _note(self, item: T) -> None:
        """Take note of what is yielded."""

    def cancel(self) -> None:
        """Stop the generation, from any thread; the stream then ends with the finish_reason "cancelled"."""
        self.stop.cancel()

    def close(self) -> None:
        """Stop the generation and free its session, from any thread; calling close() again does nothing.

        A thread that is reading comes to the end of the stream first. From a callback of the stream itself, close()
        only stops the generation; the session is free when the reader has come to the end.
        """
        self.stop.cancel()
        if not self.reader.is_here:
            visit = Visit(closes=True)
            try:
                self.reader.enter(visit, self.stop.cancel)  # which asks a reader to leave
                self._items.close()
            finally:
                self.reader.leave(visit)

    def close_soon(self, then: Callable[[], None]) -> bool:
        """Stop the generation from a callback of the stream; return False, and do nothing, elsewhere.

        `then` is called after the step that called the callback.
        """
        if not self.reader.is_here:
            return False
        self.stop.cancel()
        self.reader.afterwards(then)
        return True


def _stopped_by(cancel: CancelToken, stop: CancelToken, items: Generator[T]) -> Generator[T]:
    """Yield `items`; while they are read, cancelling `cancel` also cancels `stop`."""
    with cancel.calling(stop.cancel):
        if cancel.cancelled:
            stop.cancel()
        yield from items
