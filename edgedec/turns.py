"""Requests to one model take turns, in the order in which they came."""

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from edgedec.errors import BusyError
from edgedec.progress import CancelToken

_POLL_S = 0.05


class Turns:
    """A fair lock that says so instead of deadlocking when its holder asks again."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[object] = deque()
        self._holder: int | None = None

    @property
    def mine(self) -> bool:
        """Whether this thread holds the turn."""
        return self._holder == threading.get_ident()

    @contextmanager
    def turn(self, cancel: CancelToken) -> Iterator[bool]:
        """Wait for the turn and hold it inside the block; yields False, without a turn, when cancelled.

        Raises:
            BusyError: This thread holds the turn already (a stream it has not finished).
        """
        me, ticket = threading.get_ident(), object()
        with self._changed:
            if self.mine:
                raise BusyError(
                    "this thread is in the middle of a stream from the same model; finish or close it first, "
                    "or load the model a second time"
                )
            self._waiting.append(ticket)
            while (self._holder is not None or self._waiting[0] is not ticket) and not cancel.cancelled:
                self._changed.wait(_POLL_S)
            self._waiting.remove(ticket)
            granted = not cancel.cancelled
            if granted:
                self._holder = me
            self._changed.notify_all()
        try:
            yield granted
        finally:
            if granted:
                with self._changed:
                    self._holder = None
                    self._changed.notify_all()
