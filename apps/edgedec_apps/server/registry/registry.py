"""The registry of models: which are loaded, and how many requests use each; it loads and unloads within one memory.

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
from edgedec_apps.reply_marks import marks_of
from edgedec_apps.server.core.budget import RequestQueue
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.generation import to_its_end
from edgedec_apps.server.registry.models import FOREVER_S, CrowdedError, Loaded, Prepare, Prepared, Recipe

_CONTEXT_STEP = 64  # how exactly the largest context that fits is found, in tokens
_LOG = getLogger("edgedec.server")
T = TypeVar("T")


@dataclass(eq=False, slots=True)
class ModelEntry:
    """One model in the registry, whether it is loaded or not.

    Attributes:
        recipe: What is loaded.
        queue: The requests of this model that run and that wait.
        loaded: The model, while it is loaded.
        n_references: Requests that use it.
        leaving: Whether it will be unloaded once its requests have ended.
        used_s: When a request began or ended to use it for the last time, by the monotonic clock.
        until_s: When it is unloaded if nobody uses it, by the monotonic clock.
        idle: Set while no request uses it.
    """

    recipe: Recipe
    queue: RequestQueue
    loaded: Loaded | None = None
    n_references: int = 0
    leaving: bool = False
    used_s: float = 0.0
    until_s: float = FOREVER_S
    idle: asyncio.Event = field(default_factory=asyncio.Event)

    def serves(self, n_ctx: int | None) -> bool:
        """Return whether a request may use the model now, with a context of at least `n_ctx` tokens."""
        return self.loaded is not None and not self.leaving and (n_ctx or 0) <= self.loaded.engine.n_ctx

    @property
    def is_due(self) -> bool:
        """Whether nobody has used the loaded model for as long as it is kept."""
        return self.loaded is not None and not self.n_references and self.until_s <= monotonic()

    @property
    def expires_at(self) -> float:
        """When the model is unloaded if nobody uses it, in seconds since 1970; infinite for never."""
        return time.time() + self.until_s - monotonic()


@dataclass(slots=True)
class Reference:
    """The use of a model by a request; the model stays loaded until the reference is released.

    Attributes:
        load_s: Seconds that the request waited until the model was loaded; 0 where it was loaded before.
    """

    loaded: Loaded
    load_s: float
    _give_back: Callable[[], None] | None

    def release(self) -> None:
        """Give the model back; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


class ModelRegistry:
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
        self._entries: dict[Recipe, ModelEntry] = {}
        self._turn = asyncio.Lock()
        self._news = asyncio.Event()
        self._loading = CancelToken()
        self._waiting: set[asyncio.Task[Any]] = set()
        self._ended: ApiError | None = None

    @property
    def entries(self) -> list[ModelEntry]:
        """All models that were asked for so far."""
        return list(self._entries.values())

    @property
    def loaded(self) -> list[ModelEntry]:
        """The entries of the models that are loaded, the least recently used first."""
        return sorted((entry for entry in self._entries.values() if entry.loaded), key=lambda entry: entry.used_s)

    @property
    def models(self) -> list[Loaded]:
        """The models that are loaded, the least recently used first."""
        return [entry.loaded for entry in self.loaded if entry.loaded is not None]

    def entry(self, recipe: Recipe) -> ModelEntry:
        """Return the entry of a model."""
        return self._entries.setdefault(recipe, ModelEntry(recipe, RequestQueue(*self._limits)))

    async def acquire(self, recipe: Recipe, *, n_ctx: int | None = None, keep_s: float = FOREVER_S) -> Reference:
        """Return a reference to a model, which is loaded where it has to be; the caller releases the reference.

        Args:
            n_ctx: The least tokens of its context. A model that is loaded with fewer is loaded again.
            keep_s: Seconds for which it stays loaded after the request.

        Raises:
            ApiError: The context does not fit (400; the message has the largest that fits), or the server is ending.
            EdgedecError: The model can't be loaded; the other models are as they were.
        """
        entry, begun = self.entry(recipe), perf_counter()
        ready = entry.serves(n_ctx)
        with self._stoppable():
            async with nullcontext() if ready else self._turn:
                if not entry.serves(n_ctx):
                    await self._load(entry, n_ctx)
                assert entry.loaded is not None
                entry.n_references += 1
                entry.idle.clear()
                entry.used_s = monotonic()

        def give_back() -> None:
            entry.n_references -= 1
            self._rest(entry, keep_s)

        return Reference(entry.loaded, 0.0 if ready else perf_counter() - begun, give_back)

    async def preload(self, recipe: Recipe, *, n_ctx: int | None = None, keep_s: float = FOREVER_S) -> None:
        """Load a model if it fits beside those that are loaded.

        Raises:
            EdgedecError: The model can't be loaded.
        """
        with self._stoppable():
            async with self._turn:
                entry = self.entry(recipe)
                if entry.loaded is not None:  # as another preset of the same model
                    return
                prepared = await self._prepared(recipe, n_ctx)
                if prepared is not None and prepared.fits:
                    await self._open(entry, prepared)
                    self._rest(entry, keep_s)

    async def unload(self, which: Callable[[ModelEntry], bool], then: Callable[[], object] = lambda: None) -> None:
        """Unload models after their requests have ended, then call `then` in a thread before another model is loaded.

        Args:
            which: Tells of an entry whether its model is meant.
            then: What is to be done while none of these models is loaded.

        Raises:
            ApiError: The server is ending.
            EdgedecError: As `then`.
        """
        with self._stoppable():
            async with self._turn:
                for entry in self.loaded:
                    if which(entry):
                        await self._empty(entry)
                await self._in_thread(then)

    async def expire(self) -> None:
        """Unload models that were not used for as long as they are kept; runs until it is cancelled."""
        while True:
            self._news.clear()
            due_s = min((entry.until_s for entry in self.loaded if not entry.n_references), default=FOREVER_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_s == FOREVER_S else max(0.0, due_s - monotonic())):
                    await self._news.wait()
            for entry in self.loaded:
                if entry.is_due:
                    async with self._turn:
                        if entry.is_due:
                            await self._unload(entry)

    def stop(self, why: ApiError) -> None:
        """Refuse new requests, and end those that wait for a model, by an error; cancel the load that they wait for."""
        self._ended = why
        self._loading.cancel()
        for task in list(self._waiting):
            task.cancel()

    def close(self) -> None:
        """Unload all models; called when the event loop has ended."""
        for loaded in self.models:
            loaded.close()

    def _rest(self, entry: ModelEntry, keep_s: float) -> None:
        entry.used_s = monotonic()
        entry.until_s = entry.used_s + keep_s
        if not entry.n_references:
            entry.idle.set()
        self._news.set()

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

    async def _load(self, entry: ModelEntry, n_ctx: int | None) -> None:
        """Load a model, again where its context is too short, and unload others where it needs their memory.

        It is planned anew after each that is unloaded: what that one leaves behind is known only then, and a plan that
        waited for its requests to end would hold the model's header meanwhile.
        """
        while True:
            prepared = await self._prepared(entry.recipe, n_ctx)
            victim = entry if prepared is not None and entry.loaded is not None else None
            if prepared is not None and victim is None and prepared.fits:
                try:
                    return await self._open(entry, prepared)
                except MemoryCapError:  # the system has less memory than planned, as other programs took it
                    if not self.loaded:
                        raise
            del prepared
            # Else the least recently used model that no request uses, or that any uses.
            await self._empty(victim or min(self.loaded, key=lambda each: (each.n_references > 0, each.used_s)))

    async def _empty(self, entry: ModelEntry) -> None:
        """Unload a model after its requests have ended; new requests for it wait."""
        async with self._resting([entry]):
            await self._unload(entry)

    @asynccontextmanager
    async def _resting(self, entries: Sequence[ModelEntry]) -> AsyncIterator[None]:
        """Let nobody use these models inside the block: requests that run end before it, and new ones wait."""
        for entry in entries:
            entry.leaving = True
        try:
            for entry in entries:
                while entry.n_references:
                    await entry.idle.wait()
            yield
        finally:
            for entry in entries:
                entry.leaving = False

    async def _unload(self, entry: ModelEntry) -> None:
        loaded, entry.loaded = entry.loaded, None  # first, as nobody may look at a model while it is freed
        assert loaded is not None
        assert not entry.n_references
        try:
            await self._in_thread(loaded.close)
        except Exception as error:  # the model is freed nevertheless
            _LOG.warning("%s: %s", type(error).__name__, error)
        finally:
            del loaded
            self._on_change()
        await self._in_thread(give_back)  # the engine is gone only now, with its vocabulary and its drafters

    async def _open(self, entry: ModelEntry, prepared: Prepared) -> None:
        def open_it() -> None:  # a model that is loaded when its request has gone stays loaded as any other
            entry.loaded = prepared.open()
            if (template := entry.loaded.engine.template) is not None:
                marks_of(template.source)  # what the template tells of calls is looked up from now on

        try:
            await self._in_thread(open_it)
        finally:
            if entry.loaded is not None:
                entry.queue.load(len(entry.loaded.engine.pool.slots))
                self._rest(entry, 0.0)
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
        return await to_its_end(asyncio.to_thread(function), lambda: self._loading.cancel())
