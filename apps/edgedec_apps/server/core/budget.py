"""The queue of requests, and the account of their memory: both are a budget that requests take from and wait for.

A request takes memory before it uses it, from its body to its answer. Where there is not enough, the request waits
unread, and the system holds back what its client sends. So that slow bodies block nobody, a part of the memory is for
small requests only, the smallest waiting request comes first, and while a request waits, a body must be complete within
two seconds.

Before a request has a thread it waits for a place at its model: first come, first served. A model has as many places as
sessions, so that requests wait here alone; of the sessions that are free, edgedec/decoding/session_pool.py chooses the
one that holds most of the prompt.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from time import monotonic

from edgedec.memory.shedding import give_back
from edgedec.memory_plan import format_bytes
from edgedec_apps.server.core.errors import ApiError

MEMORY = "edgedec.memory"
"""The key of a request's RequestMemory in its scope."""

_WORTH_GIVING_BACK_BYTES = 1_000_000
_HURRIED_S = 2.0
_LOOK_S = 0.25
_MOST_RETRY_S = 60
_SHARE_OF_LATEST = 0.2


class Budget:
    """Units that requests take and give back.

    What is free goes to the smallest request that waits; of equal ones, to the first. Used by one event loop.

    Attributes:
        n_total: Units in all.
        n_taken: Units that requests hold.
    """

    def __init__(self, n_total: int) -> None:
        self.n_total, self.n_taken = n_total, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []  # units, those held already, and the answer

    @property
    def n_waiting(self) -> int:
        """How many requests wait."""
        return sum(not there.done() for _, _, there in self._waiting)

    def take_now(self, n: int, n_held: int = 0) -> bool:
        """Take n units, if they are free, for a request that holds `n_held`; return whether they were."""
        is_free = self._is_free(n, n_held)
        self.n_taken += n if is_free else 0
        return is_free

    async def take(self, n: int, n_held: int = 0) -> None:
        """Take n units for a request that holds `n_held`, and wait until they are free."""
        if self.take_now(n, n_held):
            return
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (n, n_held, there)
        self._waiting.append(entry)
        try:
            await self._wait(there)
        except asyncio.CancelledError:
            if there.done() and not there.cancelled():  # the units were given at the same moment
                self.give(n)
            raise
        finally:
            self._waiting.remove(entry)

    def give(self, n: int) -> None:
        """Give units back, and pass them on."""
        self.n_taken -= n
        self._pass_on()

    def resize(self, n_total: int) -> None:
        """Change how many units there are."""
        self.n_total = n_total
        self._pass_on()

    def _pass_on(self) -> None:
        for n, n_held, there in sorted(self._waiting, key=lambda entry: entry[0]):
            if not there.done() and self.take_now(n, n_held):
                there.set_result(None)

    def _is_free(self, n: int, n_held: int) -> bool:
        return self.n_taken + n <= self.n_total

    async def _wait(self, there: "asyncio.Future[None]") -> None:
        await there


class RequestQueue(Budget):
    """The requests of one model: a bounded number of places, in which they run, and a bounded queue before them.

    Args:
        n_parallel: Most requests that may run at once.
        n_queue: Most requests that may wait for a place.

    Attributes:
        n_preparing: Requests whose prompts are being encoded; each will take a place, or wait for one.
    """

    def __init__(self, n_parallel: int, n_queue: int) -> None:
        super().__init__(n_parallel)
        self.n_preparing = 0
        self._n_parallel, self._n_queue = n_parallel, n_queue
        self._usual_s = 1.0

    @property
    def n_running(self) -> int:
        """Number of requests that have a place."""
        return self.n_taken

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for a place, or are prepared."""
        return super().n_waiting + self.n_preparing

    def load(self, n_sessions: int) -> None:
        """Have as many places as the model that was loaded has sessions, at most as many as requests may run."""
        self.resize(min(self._n_parallel, n_sessions))

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count the request as waiting inside the block, which encodes its prompts.

        Raises:
            ApiError: No more requests may wait (429, with the seconds after which to try again).
        """
        n_there = self.n_waiting + self.n_running
        if n_there >= self._n_parallel + self._n_queue:
            running = "1 request is running" if self.n_running == 1 else f"{self.n_running} requests are running"
            waiting = f"{self.n_waiting} {'is' if self.n_waiting == 1 else 'are'} waiting"
            raise ApiError(
                f"{running} and {waiting}, and no more may wait (--parallel {self._n_parallel}, --queue "
                f"{self._n_queue}); try again later",
                status=429,
                code="queue_full",
                retry_after_s=min(_MOST_RETRY_S, max(1, math.ceil(n_there / self.n_total * self._usual_s))),
            )

        self.n_preparing += 1
        try:
            yield
        finally:
            self.n_preparing -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[float]:
        """Wait for a place and hold it inside the block; yields the seconds waited."""
        arrived = monotonic()
        await self.take(1)
        begun = monotonic()
        try:
            yield begun - arrived
        finally:
            self._usual_s += _SHARE_OF_LATEST * (monotonic() - begun - self._usual_s)
            self.give(1)


class MemoryBudget(Budget):
    """The bytes of memory for all requests together.

    Attributes:
        on_shortage: Called when a request needs bytes that are not free; it may give some back.
        is_closing: Whether the server ends, so that no body is read any more.
    """

    def __init__(self, n_total: int) -> None:
        super().__init__(n_total)
        self.on_shortage: Callable[[], None] = lambda: None
        self.is_closing = False
        self._reading: dict[asyncio.Timeout, float] = {}  # by the timeouts of bodies, when their reading began

    @property
    def n_most(self) -> int:
        """Most bytes that one request may hold."""
        return self.n_total - self.n_total // 8

    @contextmanager
    def reading(self, clock: asyncio.Timeout) -> Iterator[None]:
        """Let close() and requests that wait for memory expire `clock`, the timeout of the block that reads a body."""
        self._reading[clock] = asyncio.get_running_loop().time()
        if self.is_closing:
            clock.reschedule(0.0)
        try:
            yield
        finally:
            del self._reading[clock]

    def close(self) -> None:
        """Expire the timeouts of all bodies, as the server ends."""
        self.is_closing = True
        for clock in self._reading:
            if not clock.expired():
                clock.reschedule(0.0)

    def _is_free(self, n: int, n_held: int) -> bool:
        is_small = n_held + n <= self.n_total // 16
        return self.n_taken + n <= (self.n_total if is_small else self.n_most)

    async def _wait(self, there: "asyncio.Future[None]") -> None:
        self.on_shortage()
        while not there.done():
            self._hurry()
            await asyncio.wait({there}, timeout=_LOOK_S)

    def _hurry(self) -> None:
        """Expire the timeout of the body that has been read for the longest time, where that is too long."""
        now = asyncio.get_running_loop().time()
        clock, begun_s = next(iter(self._reading.items()), (None, now))
        if clock is not None and now - begun_s > _HURRIED_S and not clock.expired():
            clock.reschedule(now)


class RequestMemory:
    """The memory that one request holds, from its first byte to the end of its answer.

    Attributes:
        n_bytes: Bytes held.
        budget: The memory of all requests.
    """

    def __init__(self, budget: MemoryBudget, patience_s: float) -> None:
        self.n_bytes = 0
        self.budget = budget
        self._patience_s, self._n_peak = patience_s, 0

    async def grow(self, n_bytes: int) -> None:
        """Take more bytes.

        Raises:
            ApiError: The request would hold more than one request may (413), or there was not enough memory in time
                (503).
        """
        n_wanted = self.n_bytes + n_bytes
        if n_wanted > self.budget.n_most:
            raise ApiError(
                f"the request needs about {format_bytes(n_wanted)} of memory, and one request may use "
                f"{format_bytes(self.budget.n_most)}; make it shorter, or allow the server more (--memory)",
                status=413,
                code="too_large",
            )
        try:
            async with asyncio.timeout(self._patience_s):
                await self.budget.take(n_bytes, self.n_bytes)
        except TimeoutError:
            what = "other requests use all the memory for requests; try again later"
            raise ApiError(what, status=503, code="busy", retry_after_s=5) from None
        self.n_bytes += n_bytes
        self._n_peak = max(self._n_peak, self.n_bytes)

    @asynccontextmanager
    async def more(self, n_bytes: int) -> AsyncIterator[None]:
        """Hold more bytes inside the block (ApiError as grow)."""
        await self.grow(n_bytes)
        try:
            yield
        finally:
            self.n_bytes -= n_bytes
            self.budget.give(n_bytes)

    def close(self) -> None:
        """Give all bytes back, and much freed memory to the system; a second call does nothing."""
        self.budget.give(self.n_bytes)
        self.n_bytes = 0
        if self._n_peak >= _WORTH_GIVING_BACK_BYTES:
            self._n_peak = 0
            asyncio.get_running_loop().run_in_executor(None, give_back)
