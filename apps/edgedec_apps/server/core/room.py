"""Limits the memory of requests, from their bodies to their answers.

A request takes its share before it uses memory. Where there is not enough, the request waits unread, and the system
holds back what its client sends. So that slow bodies block nobody, a part of the memory is kept for small requests, the
smallest waiting request comes first, and while a request waits, a body must be complete within two seconds.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager

from edgedec.memory.shedding import give_back
from edgedec.memory_plan import format_bytes
from edgedec_apps.server.core.errors import ApiError

SHARE = "edgedec.share"
"""The key of a request's Share in its scope."""

_WORTH_GIVING_BACK_BYTES = 1_000_000
_HURRIED_S = 2.0
_LOOK_S = 0.25


class Room:
    """The memory for all requests together. Used by one event loop.

    Attributes:
        n_bytes: Bytes in all.
        n_taken: Bytes that requests hold.
        on_shortage: Called when a request needs bytes that are not there; it may give some back.
    """

    def __init__(self, n_bytes: int) -> None:
        self.n_bytes = n_bytes
        self.n_taken = 0
        self.on_shortage: Callable[[], None] = lambda: None
        self._waiting: list[tuple[Share, int, asyncio.Future[None]]] = []
        self._reading: dict[Share, tuple[float, asyncio.Timeout]] = {}

    @property
    def n_most(self) -> int:
        """Most bytes that one request may hold."""
        return self.n_bytes - self.n_bytes // 8

    @property
    def n_waiting(self) -> int:
        """How many requests wait for bytes."""
        return len(self._waiting)

    def _has(self, share: "Share", n_bytes: int) -> bool:
        small = share.n_bytes + n_bytes <= self.n_bytes // 16
        return self.n_taken + n_bytes <= (self.n_bytes if small else self.n_most)

    async def take(self, share: "Share", n_bytes: int) -> None:
        """Take bytes for a request, and wait until there are enough."""
        if self.take_now(share, n_bytes):
            return
        self.on_shortage()
        if self.take_now(share, n_bytes):
            return
        there: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (share, n_bytes, there)
        self._waiting.append(entry)
        try:
            while not there.done():
                self._hurry()
                await asyncio.wait({there}, timeout=_LOOK_S)
        except asyncio.CancelledError:
            if there.done():  # the bytes were given at the same moment
                self.leave(share, n_bytes)
            raise
        finally:
            self._waiting.remove(entry)

    def take_now(self, share: "Share", n_bytes: int) -> bool:
        """Take bytes if there are enough, and return whether there are."""
        if not self._has(share, n_bytes):
            return False
        self._give(share, n_bytes)
        return True

    def _give(self, share: "Share", n_bytes: int) -> None:
        self.n_taken += n_bytes
        share.n_bytes += n_bytes

    @contextmanager
    def reading(self, share: "Share", clock: asyncio.Timeout) -> Iterator[None]:
        """Let requests that wait for memory expire `clock`, the timeout of the block, which reads a body."""
        self._reading[share] = asyncio.get_running_loop().time(), clock
        try:
            yield
        finally:
            del self._reading[share]

    def _hurry(self) -> None:
        """Expire the timeout of the body that has been read for the longest time, where that is too long."""
        now = asyncio.get_running_loop().time()
        begun_s, clock = min(self._reading.values(), key=lambda each: each[0], default=(now, None))
        if clock is not None and now - begun_s > _HURRIED_S and not clock.expired():
            clock.reschedule(now)

    def leave(self, share: "Share", n_bytes: int) -> None:
        """Give bytes of a request back, and give them to waiting requests, the smallest first."""
        self._give(share, -n_bytes)
        for waiting, n_wanted, there in sorted(self._waiting, key=lambda entry: entry[1]):
            if not there.done() and self._has(waiting, n_wanted):
                self._give(waiting, n_wanted)
                there.set_result(None)


class Share:
    """The memory that one request holds, from its first byte to the end of its answer.

    Attributes:
        n_bytes: Bytes held.
    """

    def __init__(self, room: Room, patience_s: float) -> None:
        self.n_bytes = 0
        self._room = room
        self._patience_s = patience_s
        self._n_peak = 0

    async def grow(self, n_bytes: int) -> None:
        """Take more bytes.

        Raises:
            ApiError: The share would exceed what one request may hold (413), or there was not enough memory in time
                (503).
        """
        wanted = self.n_bytes + n_bytes
        if wanted > self._room.n_most:
            raise ApiError(
                f"the request needs about {format_bytes(wanted)} of memory, and one request may use "
                f"{format_bytes(self._room.n_most)}; make it shorter, or allow the server more (--memory)",
                status=413,
                code="too_large",
            )
        try:
            async with asyncio.timeout(self._patience_s):
                await self._room.take(self, n_bytes)
        except TimeoutError:
            raise ApiError(
                "other requests use all the memory for requests; try again later",
                status=503,
                code="busy",
                retry_after_s=5,
            ) from None
        self._n_peak = max(self._n_peak, self.n_bytes)

    def reading(self, clock: asyncio.Timeout) -> AbstractContextManager[None]:
        """Let requests that wait for memory expire `clock`, the timeout of the block, which reads a body."""
        return self._room.reading(self, clock)

    @asynccontextmanager
    async def more(self, n_bytes: int) -> AsyncIterator[None]:
        """Hold more bytes inside the block (ApiError as grow)."""
        await self.grow(n_bytes)
        try:
            yield
        finally:
            self._room.leave(self, n_bytes)

    def close(self) -> None:
        """Give all bytes back, and much freed memory to the system; a second call does nothing."""
        self._room.leave(self, self.n_bytes)
        if self._n_peak >= _WORTH_GIVING_BACK_BYTES:
            self._n_peak = 0
            asyncio.get_running_loop().run_in_executor(None, give_back)
