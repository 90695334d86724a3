"""The shelf: which models are loaded. It lends them to requests, and loads and unloads them within one memory plan.

Each model is planned as if it were alone, so its context and its drafters never depend on what else is loaded. Where it
does not fit beside the others, the least recently used of them is unloaded: after its requests have ended, while new
requests for it wait. Loads and unloads take turns, first come, first served, so every request has its turn. A request
for a model that is loaded, and that nobody waits to unload, does not wait at all. Used by one event loop.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from logging import getLogger
from time import monotonic, perf_counter
from typing import Any, TypeVar

from edgedec.errors import MemoryCapError
from edgedec.memory.shedding import give_back
from edgedec.progress import CancelToken
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.shelf.models import CrowdedError, Loaded, Prepare, Prepared, Recipe
from edgedec_apps.server.shelf.request_queue import RequestQueue

FOREVER_S = float("inf")
_CONTEXT_STEP = 64  # how exactly the largest context that fits is found, in tokens
_LOG = getLogger("edgedec.server")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class ShelfPlace:
    """The place of one model on the shelf, whether it is loaded or not.

    Attributes:
        recipe: What is loaded.
        queue: The requests of this model that run and that wait.
        loaded: The model, while it is loaded.
        n_bytes: The most bytes that it holds while it is loaded.
        n_users: Requests to which it is lent.
        leaving: Whether it will be unloaded once its requests have ended.
        used_s: When it was lent or given back for the last time, by the monotonic clock.
        until_s: When it is unloaded if nobody uses it, by the monotonic clock.
    """

    recipe: Recipe
    queue: RequestQueue
    loaded: Loaded | None = None
    n_bytes: int = 0
    n_users: int = 0
    leaving: bool = False
    used_s: float = 0.0
    until_s: float = FOREVER_S
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def serves(self, n_ctx: int | None) -> bool:
        """Return whether a request may use the model now, with a context of at least `n_ctx` tokens."""
        return self.loaded is not None and not self.leaving and (n_ctx or 0) <= self.loaded.engine.n_ctx

    @property
    def expires_at(self) -> float:
        """When the model is unloaded if nobody uses it, in seconds since 1970; infinite for never."""
        return time.time() + self.until_s - monotonic()


class Lease:
    """A model that is lent to a request.

    Attributes:
        loaded: The model.
        load_s: Seconds that the request waited until the model was loaded; 0 where it was loaded before.
    """

    def __init__(self, loaded: Loaded, load_s: float, give_back: Callable[[], None]) -> None:
        self.loaded = loaded
        self.load_s = load_s
        self._give_back: Callable[[], None] | None = give_back

    def release(self) -> None:
        """Give the model back; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class Shelf:
    """The models of a server.

    Args:
        prepare: Plans how a model is loaded.
        n_parallel: Requests of one model that run at once.
        n_queue: Requests of one model that may wait.
        on_change: Called in the event loop after a model was loaded or unloaded.
    """

    def __init__(self, prepare: Prepare, n_parallel: int, n_queue: int, on_change: Callable[[], None]) -> None:
        self._prepare = prepare
        self._limits = n_parallel, n_queue
        self._on_change = on_change
        self._places: dict[Recipe, ShelfPlace] = {}
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._loading = CancelToken()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._ended: ApiError | None = None

    @property
    def places(self) -> list[ShelfPlace]:
        """All places that were asked for so far."""
        return list(self._places.values())

    @property
    def loaded(self) -> list[ShelfPlace]:
        """The places of the models that are loaded, the least recently used first."""
        return sorted((place for place in self._places.values() if place.loaded), key=lambda place: place.used_s)

    def place(self, recipe: Recipe) -> ShelfPlace:
        """Return the place of a model."""
        return self._places.setdefault(recipe, ShelfPlace(recipe, RequestQueue(*self._limits)))

    async def take(self, recipe: Recipe, *, n_ctx: int | None = None, keep_s: float = FOREVER_S) -> Lease:
        """Lend a model, loaded where it has to be; the caller releases the lease.

        Args:
            recipe: The model.
            n_ctx: The least tokens of its context. A model that is loaded with fewer is loaded again.
            keep_s: Seconds for which it stays loaded after the lease.

        Raises:
            ApiError: The context does not fit (400; the message has the largest that fits), or the server is ending.
            EdgedecError: The model can't be loaded; the other models are as they were.
        """
        place, begun = self.place(recipe), perf_counter()
        ready = place.serves(n_ctx)
        with self._stoppable():
            async with nullcontext() if ready else self._turn:
                if not place.serves(n_ctx):
                    await self._load(place, n_ctx)
                assert place.loaded is not None
                place.n_users += 1
                place.idle.clear()
                place.used_s = monotonic()
        load_s = 0.0 if ready else perf_counter() - begun
        return Lease(place.loaded, load_s, lambda: self._give_back(place, keep_s))

    async def preload(self, recipe: Recipe, *, n_ctx: int | None = None, keep_s: float = FOREVER_S) -> bool:
        """Load a model if it fits beside those that are loaded, and return whether it does.

        Raises:
            EdgedecError: The model can't be loaded.
        """
        with self._stoppable():
            async with self._turn:
                place = self.place(recipe)
                if place.loaded is not None:  # as another preset of the same model
                    return True
                prepared = await self._prepared(recipe, n_ctx)
                if prepared is None or not self._fits(prepared):
                    return False
                await self._open(place, prepared)
                self._rest(place, keep_s)
        return True

    async def unload(self, which: Callable[[ShelfPlace], bool], then: Callable[[], object] = lambda: None) -> None:
        """Unload models after their requests have ended, then call `then` in a thread before another model is loaded.

        Args:
            which: Tells of a place whether its model is meant.
            then: What is to be done while none of these models is loaded.

        Raises:
            ApiError: The server is ending.
            EdgedecError: As `then`.
        """
        with self._stoppable():
            async with self._turn:
                for place in self.loaded:
                    if which(place):
                        await self._empty(place)
                await self._in_thread(then)

    async def expire(self) -> None:
        """Unload models that were not used for as long as they are kept; runs until it is cancelled."""
        while True:
            self._news.clear()
            due_s = min((place.until_s for place in self.loaded if not place.n_users), default=FOREVER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_s == FOREVER_S else max(0.0, due_s - monotonic())):
                    await self._news.wait()
            for place in self.loaded:
                if _is_due(place):
                    async with self._turn:
                        if _is_due(place):
                            await self._unload(place)

    def stop(self, why: ApiError) -> None:
        """Refuse new requests, and end those that wait for a model, by an error; cancel the load that they wait for."""
        self._ended = why
        self._loading.cancel()
        for task in list(self._waiting):
            task.cancel()

    def close(self) -> None:
        """Unload all models; called when the event loop has ended."""
        for place in self.loaded:
            loaded, place.loaded = place.loaded, None
            if loaded is not None:
                loaded.close()

    def _give_back(self, place: ShelfPlace, keep_s: float) -> None:
        place.n_users -= 1
        self._rest(place, keep_s)

    def _rest(self, place: ShelfPlace, keep_s: float) -> None:
        place.used_s = monotonic()
        place.until_s = place.used_s + keep_s
        if not place.n_users:
            place.idle.set()
        self._news.set()

    def _fits(self, prepared: Prepared) -> bool:
        """Return whether a model fits beside those that are loaded; alone it does."""
        loaded = self.loaded
        return not loaded or sum(place.n_bytes for place in loaded) + prepared.n_bytes <= prepared.budget_bytes

    async def _prepared(self, recipe: Recipe, n_ctx: int | None) -> Prepared | None:
        """Return a model as _prepare_for; None where another model must be unloaded before it can be planned."""
        try:
            return await self._in_thread(lambda: self._prepare_for(self._prepare, recipe, n_ctx))
        except CrowdedError as error:
            at_rest = error.at_rest
        async with self._resting(self.loaded):
            try:
                return await self._in_thread(lambda: self._prepare_for(at_rest, recipe, n_ctx))
            except CrowdedError:
                if not self.loaded:
                    raise
                return None

    async def _load(self, place: ShelfPlace, n_ctx: int | None) -> None:
        """Load a model, again where its context is too short, and unload others where it needs their memory.

        It is planned anew after each that is unloaded: what that one leaves behind is known only then, and a plan that
        waited for its requests to end would hold the model's header meanwhile.
        """
        while True:
            prepared = await self._prepared(place.recipe, n_ctx)
            victim = place if prepared is not None and place.loaded is not None else None
            if prepared is not None and victim is None and self._fits(prepared):
                try:
                    return await self._open(place, prepared)
                except MemoryCapError:  # the system has less memory than planned, as other programs took it
                    if not self.loaded:
                        raise
            del prepared
            await self._empty(victim or self._victim())

    def _victim(self) -> ShelfPlace:
        """Return the model to unload: the least recently used that no request uses, or else that any uses."""
        return min(self.loaded, key=lambda place: (place.n_users > 0, place.used_s))

    async def _empty(self, place: ShelfPlace) -> None:
        """Unload a model after its requests have ended; new requests for it wait."""
        async with self._resting([place]):
            await self._unload(place)

    @asynccontextmanager
    async def _resting(self, places: Sequence[ShelfPlace]) -> AsyncIterator[None]:
        """Let nobody use these models inside the block: requests that run end before it, and new ones wait."""
        for place in places:
            place.leaving = True
        try:
            for place in places:
                while place.n_users:
                    await place.idle.wait()
            yield
        finally:
            for place in places:
                place.leaving = False

    async def _unload(self, place: ShelfPlace) -> None:
        assert place.loaded is not None
        assert not place.n_users
        place.leaving = True
        try:
            await self._in_thread(place.loaded.close)
        except Exception as error:  # the model is freed nevertheless
            _LOG.warning("%s: %s", type(error).__name__, error)
        finally:
            place.loaded, place.leaving, place.n_bytes = None, False, 0
            self._on_change()
        await self._in_thread(give_back)  # the engine is gone only now, with its vocabulary and its drafters

    async def _open(self, place: ShelfPlace, prepared: Prepared) -> None:
        def open_it() -> None:  # a model that is loaded when its request has gone is on the shelf as any other
            place.loaded = prepared.open()

        place.n_bytes = prepared.n_bytes
        try:
            await self._in_thread(open_it)
        finally:
            if place.loaded is not None:
                self._rest(place, 0.0)
                self._on_change()

    def _prepare_for(self, prepare: Prepare, recipe: Recipe, n_ctx: int | None) -> Prepared:
        """Return a model prepared with a context of at least `n_ctx` tokens (ApiError where it does not fit)."""
        cancel = self._loading
        usual = prepare(recipe, None, cancel)
        if n_ctx is None or n_ctx <= usual.n_ctx:
            return usual

        def fitting(n: int) -> Prepared | None:
            try:
                return prepare(recipe, n, cancel)
            except CrowdedError:
                raise
            except MemoryCapError:
                return None

        most = min(n_ctx, max(usual.n_ctx, usual.n_ctx_train))
        longest = fitting(most)
        if longest is not None and most == n_ctx:
            return longest
        low, high, why = usual.n_ctx, most, "more does not fit into the memory of this server"
        if longest is not None:
            low, why = most, f"the model was trained for {usual.n_ctx_train}"
        while (middle := (low + high) // 2 // _CONTEXT_STEP * _CONTEXT_STEP) > low:
            low, high = (low, middle) if fitting(middle) is None else (middle, high)
        raise ApiError(
            f"options.num_ctx is {n_ctx}; the largest that fits is {low}: {why}",
            param="options.num_ctx",
            code="context_too_large",
        )

    @contextmanager
    def _stoppable(self) -> Iterator[None]:
        """Let stop() end the block with the error of a server that ends."""
        if self._ended is not None:
            raise self._ended
        task = asyncio.current_task()
        assert task is not None
        self._waiting.add(task)
        try:
            yield
        except asyncio.CancelledError:
            if self._ended is None:
                raise
            task.uncancel()
            raise self._ended from None
        finally:
            self._waiting.discard(task)

    async def _in_thread(self, function: Callable[[], T]) -> T:
        """Return the result of a function that runs in a thread.

        Where the task is cancelled, self._loading is too, and the task still waits for the thread's end: so no two
        loads run at once, and a load that ends after all is not lost.
        """
        if self._loading.cancelled and self._ended is None:
            self._loading = CancelToken()
        work = asyncio.ensure_future(asyncio.to_thread(function))
        cancelled = False
        while not work.done():
            try:
                await asyncio.wait({work})
            except asyncio.CancelledError:
                cancelled = True
                self._loading.cancel()
        if cancelled:
            work.exception()  # nobody waits for it
            raise asyncio.CancelledError
        return work.result()


def _is_due(place: ShelfPlace) -> bool:
    return place.loaded is not None and not place.n_users and place.until_s <= monotonic()
