"""Memory for requests: their bodies while they come, and what is made of them until they are answered.

A request takes its share before it makes anything. Where there is no room it waits, unread: the system holds back what
its client sends. So that bodies that come slowly keep nobody out, a part of the room is kept for small requests, the
smallest that waits comes first, and while somebody waits a body has two seconds to come.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

from edgedec.memory.watch import give_back
from edgedec.memory_plan import format_bytes
from edgedec_apps.server.errors import ApiError

SHARE = "edgedec.share"
"""Where a request's scope has its Share."""

_WORTH_GIVING_BACK_BYTES = 1_000_000
_HURRIED_S = 2.0
_LOOK_S = 0.25


class Room:
    """So many bytes for all requests together. Used by one event loop.

    Attributes:
        n_bytes: How many.
        n_taken: How many are taken.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.n_taken = 0
        self._waiting: list[tuple[Share, int, asyncio.Future[None]]] = []
        self._reading: dict[Share, tuple[float, asyncio.Timeout]] = {}

    @property
    def n_most(self) -> int:
        """Most that one request may take."""
        return self.n_bytes - self.n_bytes // 8

    def _has(self, share: "Share", n_bytes: int) -> bool:
        small = share.n_bytes + n_bytes <= self.n_bytes // 16
        return self.n_taken + n_bytes <= (self.n_bytes if small else self.n_most)

    async def take(self, share: "Share", n_bytes: int) -> None:
        """Take bytes for a request, as soon as there are so many."""
        if self._has(share, n_bytes):
            self._give(share, n_bytes)
            return
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (share, n_bytes, there)
        self._waiting.append(entry)
        try:
            while not there.done():
                self._hurry()
                await asyncio.wait({there}, timeout=_LOOK_S)
        except asyncio.CancelledError:
            if there.done():  # they were given in the same moment
                self.leave(share, n_bytes)
            raise
        finally:
            self._waiting.remove(entry)

    def _give(self, share: "Share", n_bytes: int) -> None:
        self.n_taken += n_bytes
        share.n_bytes += n_bytes

    @contextmanager
    def reading(self, share: "Share", clock: asyncio.Timeout) -> Iterator[None]:
        """Let those who wait for room stop `clock`, which is over the block that reads a body."""
        self._reading[share] = asyncio.get_running_loop().time(), clock
        try:
            yield
        finally:
            del self._reading[share]

    def _hurry(self) -> None:
        """Stop the reading that has gone on for the longest, where that is too long."""
        now = asyncio.get_running_loop().time()
        begun_s, clock = min(self._reading.values(), key=lambda each: each[0], default=(now, None))
        if clock is not None and now - begun_s > _HURRIED_S and not clock.expired():
            clock.reschedule(now)

    def leave(self, share: "Share", n_bytes: int) -> None:
        """Give bytes of a request back, and wake who waits for them, the smallest first."""
        self._give(share, -n_bytes)
        for waiting, n_wanted, there in sorted(self._waiting, key=lambda entry: entry[1]):
            if not there.done() and self._has(waiting, n_wanted):
                self._give(waiting, n_wanted)
                there.set_result(None)


class Share:
    """What one request holds of the room, from its first byte to the end of its answer.

    Attributes:
        n_bytes: How much.
    """

    def __init__(self, room: Room, patience_s: float) -> None:
        self.n_bytes = 0
        self._room = room
        self._patience_s = patience_s
        self._n_peak = 0

    async def grow(self, n_bytes: int) -> None:
        """Take more.

        Raises:
            ApiError: It is more than one request may take (413), or there is no room for too long (503).
        """
        wanted = self.n_bytes + n_bytes
        if wanted > self._room.n_most:
            raise ApiError(
                f"the request takes about {format_bytes(wanted)} of memory until it is answered; one may take "
                f"{format_bytes(self._room.n_most)}. Make it shorter, or allow the server more (--memory)",
                status=413,
                code="too_large",
            )
        try:
            async with asyncio.timeout(self._patience_s):
                await self._room.take(self, n_bytes)
        except TimeoutError:
            raise ApiError(
                "the requests that are being answered take all the memory there is for them; ask again later",
                status=503,
                code="busy",
                retry_after_s=5,
            ) from None
        self._n_peak = max(self._n_peak, self.n_bytes)

    def reading(self, clock: asyncio.Timeout) -> AbstractContextManager[None]:
        """Let those who wait for room stop `clock`, which is over the block that reads the request's body."""
        return self._room.reading(self, clock)

    @asynccontextmanager
    async def more(self, n_bytes: int) -> AsyncIterator[None]:
        """Take more inside the block; raises what grow raises."""
        await self.grow(n_bytes)
        try:
            yield
        finally:
            self._room.leave(self, n_bytes)

    def close(self) -> None:
        """Give all of it back, and to the system what was freed, where that is much; calling it again does nothing."""
        self._room.leave(self, self.n_bytes)
        if self._n_peak >= _WORTH_GIVING_BACK_BYTES:
            self._n_peak = 0
            asyncio.get_running_loop().run_in_executor(None, give_back)
