"""The sessions of an engine: what each of them holds, and the pool in which requests take turns on them.

Requests are served in the order in which they came; of the sessions that are free, a request gets the one that holds
most of its prompt.
"""

import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from edgedec.cost_curve import CostCurve
from edgedec.decoding.stream import Stream
from edgedec.errors import BusyError, SessionError
from edgedec.memory.shedding import Watch
from edgedec.model import Session
from edgedec.progress import CancelToken
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Request, n_common

if TYPE_CHECKING:
    from edgedec.decoding.shared_prefix import SharedPrefixes

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


@dataclass(slots=True)
class SessionSlot:
    """A session and what its KV cache holds, for the generations that take turns on it.

    Attributes:
        session: The target's session.
        cached_ids: The tokens in the session's KV cache, as far as they are known; while a text is being written, its
            prompt's. It is replaced before a forward that drops some of them.
        n_exact: How many of these, from the start, a cold start would compute to the same bits.
        curve: Measured cost of the session's forwards.
        drafting: What the generations draft with, or None.
        pid: The process that opened the session.
        closing: Set once the model is being closed; later generations are refused.
        stream: The stream that holds the slot, also while the stream is paused; None while the slot is free.
        runtime_reason: What a comparison of runtimes found; may be empty.
        watch: Sheds memory when memory runs short; None where there is nothing to shed, and no cap.
        forward_rows: Most rows of a forward that verifies, where memory is planned, or None.
        text_rows: Most rows of logits of a forward of several texts of one prompt, where memory is planned, or None.
        kept_rows: Rows of logits that a search may keep at a time for its texts, where memory is planned.
        row_tokens: How many tokens of the KV cache take the memory of a row of logits.
        fork_tokens: Tokens that several texts of one prompt may hold together, the prompt included, where memory is
            planned; else None.
        wait_s: Most seconds for which a text waits when what runs the model is lost; 0 ends the text with an error.
        notes: Sentences for the statistics of every text.
        prefixes: Takes prefixes of prompts over from the other slots, or None.
        reading: The prompt that is being read, while others may take its prefix over; else empty.
    """

    session: Session
    cached_ids: list[int] = field(default_factory=list)
    n_exact: int = 0
    curve: CostCurve = field(default_factory=CostCurve)
    drafting: Drafting | None = None
    pid: int = field(default_factory=os.getpid)
    closing: bool = False
    stream: "weakref.ref[Stream[Any]] | None" = None
    runtime_reason: str = ""
    watch: Watch | None = None
    forward_rows: int | None = None
    text_rows: int | None = None
    kept_rows: int = 0
    row_tokens: float = 0.0
    fork_tokens: int | None = None
    wait_s: float = 0.0
    notes: tuple[str, ...] = ()
    prefixes: "SharedPrefixes | None" = None
    reading: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.prefixes is not None:
            self.prefixes.join(self)

    def adapt(self, scales: tuple[float, ...]) -> None:
        """Let the session have these scales of adapters; what it holds with others counts as dropped."""
        if scales != self.session.scales:
            self.cached_ids, self.n_exact = [], 0  # first, as other slots may look at them
            self.session.scales = scales


@contextmanager
def session_for(
    pool: SessionPool[SessionSlot], request: Request, cancel: CancelToken, stream: "weakref.ref[Any] | None"
) -> Iterator[SessionSlot | None]:
    """Wait for a session and hold it inside the block; None where `cancel` ended the waiting.

    Of the sessions that are free, it is the one that holds most of the request's prompt; it has the request's adapters
    then. `stream` refers to the stream that reads, which close() of the model ends; None where none does.

    Raises:
        SessionError: The model is closed, or was loaded before a fork().
        BusyError: As SessionPool.turn.
    """
    if os.getpid() != pool.slots[0].pid:
        raise SessionError("the model was loaded before fork(); a child process must load its own")
    with pool.turn(cancel, lambda slot: _n_shared(slot, request)) as slot:
        if slot is None:
            yield None
            return
        try:
            slot.stream = stream  # first: whoever closes the model sets `closing`, then looks for streams
            if slot.closing:
                raise SessionError("the model is closed; load it again")
            slot.adapt(request.scales)
            with cancel.calling(slot.session.cancel):
                yield slot
        finally:
            slot.stream = None


def _n_shared(slot: SessionSlot, request: Request) -> float:
    """Return how many tokens of a prompt a session holds already; of equals the emptier counts as more."""
    held = slot.cached_ids
    n_same = n_common(held, request.prompt_ids, len(held)) if slot.session.scales == request.scales else 0
    return n_same - len(held) / (len(held) + 1)
