"""The queue: which requests run, wait or are refused, first come, first served. Used by one event loop."""

import asyncio
import math
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from time import monotonic

from edgedec_apps.server.core.errors import ApiError

_MOST_RETRY_S = 60
_SHARE_OF_LATEST = 0.2


class Slots:
    """A bounded number of places, in which requests run, and a bounded queue before them.

    Attributes:
        n_parallel: Number of places.
        n_queue: Most requests that may wait for a place.
        n_running: Requests that have a place.
        n_preparing: Requests whose prompts are being encoded; each will take a place, or wait for one.
    """

    def __init__(self, n_parallel: int, n_queue: int) -> None:
        self.n_parallel = n_parallel
        self.n_queue = n_queue
        self.n_running = self.n_preparing = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._usual_s = 1.0

    @property
    def n_waiting(self) -> int:
        """Number of requests that wait for a place, or are prepared."""
        return len(self._waiting) + self.n_preparing

    def require_room(self) -> None:
        """Raise ApiError 429, with the seconds after which to try again, where no more requests may wait."""
        n_there = self.n_waiting + self.n_running
        if n_there >= self.n_parallel + self.n_queue:
            running = "1 request is running" if self.n_running == 1 else f"{self.n_running} requests are running"
            waiting = f"{self.n_waiting} {'is' if self.n_waiting == 1 else 'are'} waiting"
            raise ApiError(
                f"{running} and {waiting}, and no more may wait (--parallel {self.n_parallel}, --queue "
                f"{self.n_queue}); try again later",
                status=429,
                code="queue_full",
                retry_after_s=min(_MOST_RETRY_S, max(1, math.ceil(n_there / self.n_parallel * self._usual_s))),
            )

    @contextmanager
    def preparing(self) -> Iterator[None]:
        """Count the request as waiting inside the block, which encodes its prompts (ApiError as require_room)."""
        self.require_room()
        self.n_preparing += 1
        try:
            yield
        finally:
            self.n_preparing -= 1

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for a place and hold it inside the block; yields the seconds waited."""
        arrived = monotonic()
        if self.n_running < self.n_parallel:
            self.n_running += 1
        else:
            await self._wait()
        begun = monotonic()
        try:
            yield begun - arrived
        finally:
            self._usual_s += _SHARE_OF_LATEST * (monotonic() - begun - self._usual_s)
            self._pass_on()

    async def _wait(self) -> None:
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():  # the place was given at the same moment
                self._pass_on()
            else:
                with suppress(ValueError):  # _pass_on may have removed it already
                    self._waiting.remove(mine)
            raise

    def _pass_on(self) -> None:
        """Give the place to the next request that waits; without one it is empty."""
        while self._waiting:
            following = self._waiting.popleft()
            if not following.done():
                following.set_result(None)
                return
        self.n_running -= 1
