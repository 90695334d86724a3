"""A pool of slots, on which requests take turns in the order in which they came."""

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
    """A thread that waits in the queue, for one slot or for all slots.

    Threads are compared as objects, because the system gives the number of an ended thread to a new one.
    """

    thread: threading.Thread
    wants_all: bool


class SessionPool(Generic[T]):
    """A fair lock on a few equal slots, which raises an error where waiting would be a deadlock.

    Attributes:
        slots: The slots; one thread at a time holds each.
        last: The slot that was held last.
    """

    def __init__(self, slots: Sequence[T]) -> None:
        self.slots = tuple(slots)
        self.last = self.slots[0]
        self._changed = threading.Condition()
        self._waiting: deque[_Waiter] = deque()
        self._holders: dict[int, threading.Thread] = {}  # by index of the slot

    @property
    def mine(self) -> bool:
        """Whether this thread holds one of the slots."""
        return threading.current_thread() in self._holders.values()

    @property
    def n_held(self) -> int:
        """How many of the slots are held."""
        return len(self._holders)

    @property
    def n_waiting(self) -> int:
        """How many threads wait, for a slot or for all of them."""
        return len(self._waiting)

    @contextmanager
    def turn(self, cancel: CancelToken, value: Callable[[T], float] | None = None) -> Iterator[T | None]:
        """Wait for a slot and hold it inside the block, which gets the slot, or None where `cancel` ended the waiting.

        Args:
            cancel: Ends the waiting.
            value: Of several free slots, the one with the highest value is taken.

        Raises:
            BusyError: This thread holds a slot for a stream that it has not finished, and would wait for ever.
        """
        index: int | None = None
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
                    index = free[0] if value is None else max(free, key=lambda i: value(self.slots[i]))
                    self._holders[index] = waiter.thread
            yield None if index is None else self.slots[index]
        finally:
            if index is not None:
                with self._changed:
                    self.last = self.slots[index]
                    self._holders.pop(index, None)
                    self._changed.notify_all()

    @contextmanager
    def all(self) -> Iterator[Sequence[T]]:
        """Wait until all slots are free and hold all of them inside the block.

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
        """Indices of the slots that are free."""
        return [i for i in range(len(self.slots)) if i not in self._holders]

    def _would_wait_for_ever(self) -> bool:
        """Tell whether no thread could go on if this one waited for a slot.

        With two slots and an unfinished stream in each of two threads, the first thread that wants another slot waits
        for the second thread; if that one wanted another slot, too, each would wait for the other.
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
        """Stand in the queue inside the block; whatever ends it (KeyboardInterrupt too), the place is given up."""
        waiter = _Waiter(threading.current_thread(), wants_all)
        self._waiting.append(waiter)
        try:
            yield waiter
        finally:
            self._waiting.remove(waiter)
            self._changed.notify_all()
