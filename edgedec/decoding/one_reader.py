"""One thread at a time reads a stream: a second reader gets an error, and whoever closes the stream waits."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from edgedec.errors import SessionError

_POLL_S = 0.05


def second_reader() -> SessionError:
    """Return the error for a stream that is read twice at the same time."""
    return SessionError(
        "this stream is being read already, by another thread or task or by a callback's caller; a stream has one "
        "reader at a time: give each reader a stream of its own, or pass the tokens on"
    )


@dataclass(eq=False, frozen=True, slots=True)
class _Visit:
    """One stay inside the stream: whose, and whether it is to close the stream."""

    thread: int
    closes: bool


class OneReader:
    """Knows which thread is inside a stream, and lets no second one in."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._visit: _Visit | None = None
        self._afterwards: list[Callable[[], None]] = []

    @property
    def is_here(self) -> bool:
        """Whether this thread is inside: it was called back from there."""
        visit = self._visit
        return visit is not None and visit.thread == threading.get_ident()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Be inside during the block; a thread that closes the stream is waited for.

        Raises:
            SessionError: Somebody is reading already.
        """
        with self._inside(_Visit(threading.get_ident(), closes=False), self._wait_to_read):
            yield

    @contextmanager
    def closing(self, stop: Callable[[], None]) -> Iterator[None]:
        """Wait until nobody is inside, then be there during the block; `stop` asks the reader to leave, repeatedly.

        Not to be called from inside, which would wait for ever.
        """

        def wait() -> None:
            while self._visit is not None:
                stop()
                self._changed.wait(_POLL_S)

        with self._inside(_Visit(threading.get_ident(), closes=True), wait):
            yield

    def afterwards(self, call: Callable[[], None]) -> None:
        """Have `call` called, by this thread, as soon as it has left."""
        self._afterwards.append(call)

    def _wait_to_read(self) -> None:
        while (visit := self._visit) is not None:
            if not visit.closes or self.is_here:
                raise second_reader()
            self._changed.wait(_POLL_S)

    @contextmanager
    def _inside(self, visit: _Visit, wait: Callable[[], None]) -> Iterator[None]:
        """Be inside during the block, whatever ends it (KeyboardInterrupt too)."""
        try:
            with self._changed:
                wait()
                self._visit = visit
            yield
        finally:
            calls: list[Callable[[], None]] = []
            if self._visit is visit:
                with self._changed:
                    calls, self._afterwards = self._afterwards, []
                    self._visit = None
                    self._changed.notify_all()
            for call in calls:
                call()
