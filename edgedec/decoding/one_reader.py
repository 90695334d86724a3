"""One thread at a time reads a stream: a second reader gets an error, and a thread that closes the stream waits."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from edgedec.errors import SessionError

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

    @contextmanager
    def closing(self, stop: Callable[[], None]) -> Iterator[None]:
        """Be inside during the block, alone, to close the stream; `stop` asks a reader to leave."""
        visit = Visit(closes=True)
        try:
            self.enter(visit, stop)
            yield
        finally:
            self.leave(visit)

    def afterwards(self, call: Callable[[], None]) -> None:
        """Have `call` called by the thread that is inside, as soon as it has left."""
        self._afterwards.append(call)
