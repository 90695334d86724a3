"""Requests take turns on what they share, in the order in which they came."""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from edgedec.errors import BusyError
from edgedec.progress import CancelToken

_POLL_S = 0.05

T = TypeVar("T")


@dataclass(eq=False, frozen=True, slots=True)
class _Waiter:
    """A thread that waits in the queue, for one of the slots or for all of them.

    Threads are compared as objects: the system gives the number of a thread that has ended to a new one.
    """

    thread: threading.Thread
    wants_all: bool


class SessionPool(Generic[T]):
    """A fair lock on a few slots of one kind, that says so instead of deadlocking when their holder asks again.

    Attributes:
        slots: What is shared; each is held by one thread at a time.
        last: The one that was held last.
    """

    def __init__(self, slots: Sequence[T]) -> None:
        self.slots = tuple(slots)
        self.last = self.slots[0]
        self._changed = threading.Condition()
        self._waiting: deque[_Waiter] = deque()
        self._holders: dict[int, threading.Thread] = {}  # by place

    @property
    def mine(self) -> bool:
        """Whether this thread holds one of the slots."""
        return threading.current_thread() in self._holders.values()

    @contextmanager
    def turn(self, cancel: CancelToken, value: Callable[[T], float] | None = None) -> Iterator[T | None]:
        """Wait for a thing and hold it inside the block; yields None, without one, when cancelled.

        Args:
            cancel: Ends the waiting.
            value: Of several that are free the one of the highest value is taken.

        Raises:
            BusyError: This thread holds a thing already (a stream it has not finished), and would wait for ever.
        """
        place: int | None = None
        try:
            with self._changed:
                if self._would_wait_for_ever():
                    raise BusyError(
                        "this thread is in the middle of a stream from the same model; finish or close it first, "
                        "or load the model a second time"
                    )
                with self._queued() as waiter:
                    while not (cancel.cancelled or (waiter is self._waiting[0] and self._free)):
                        self._changed.wait(_POLL_S)
                if not cancel.cancelled:
                    free = self._free
                    place = free[0] if value is None else max(free, key=lambda i: value(self.slots[i]))
                    self._holders[place] = waiter.thread
            yield None if place is None else self.slots[place]
        finally:
            if place is not None:
                with self._changed:
                    self.last = self.slots[place]
                    self._holders.pop(place, None)
                    self._changed.notify_all()

    @contextmanager
    def all(self) -> Iterator[Sequence[T]]:
        """Wait until nobody holds any of the slots and hold them all inside the block.

        Raises:
            BusyError: This thread holds one of them.
        """
        taken = False
        try:
            with self._changed:
                if self.mine:
                    raise BusyError(
                        "this thread is in the middle of a stream from the same model; finish it or close it"
                    )
                with self._queued(wants_all=True) as waiter:
                    while self._holders or self._waiting[0] is not waiter:
                        self._changed.wait(_POLL_S)
                taken = True
                self._holders = dict.fromkeys(range(len(self.slots)), waiter.thread)
            yield self.slots
        finally:
            if taken:
                with self._changed:
                    self._holders.clear()
                    self._changed.notify_all()

    @property
    def _free(self) -> list[int]:
        """Places that nobody holds."""
        return [i for i in range(len(self.slots)) if i not in self._holders]

    def _would_wait_for_ever(self) -> bool:
        """Tell whether nobody could go on if this thread waited: who holds a thing waits, or all wait for it to let go.

        With two slots and a stream in each of two threads, the first that asks for another one waits for the second;
        if that asks too, both would wait for each other.
        """
        n_free, queue = len(self._free), [waiter.thread for waiter in self._waiting]
        if not self.mine:
            return False
        if any(waiter.wants_all for waiter in self._waiting):
            return True
        stuck = {threading.current_thread(), *queue[n_free:]}
        return len(queue) >= n_free and stuck.issuperset([*self._holders.values(), *queue[:n_free]])

    @contextmanager
    def _queued(self, *, wants_all: bool = False) -> Iterator["_Waiter"]:
        """Stand in the queue inside the block, whatever ends it (KeyboardInterrupt too): those behind can't pass."""
        waiter = _Waiter(threading.current_thread(), wants_all)
        self._waiting.append(waiter)
        try:
            yield waiter
        finally:
            self._waiting.remove(waiter)
            self._changed.notify_all()
