"""Generations for an event loop: a thread generates, and the loop hands out the tokens.

`asyncio` is imported in the functions that need it: whoever calls them has an event loop, and so has imported it. For
all others the import would be a part of the start.
"""

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from edgedec.callers import checked_value, checks_arguments
from edgedec.decoding.stream import Stream, second_reader
from edgedec.progress import CancelToken
from edgedec.sequence import Generation, SampleOutput, TokenOutput

if TYPE_CHECKING:
    from edgedec.decoding.samples import SampleStream

E = TypeVar("E")
P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(generate: Callable[[CancelToken], T]) -> T:
    """Generate in a thread; cancelling the task stops the generation."""
    import asyncio

    cancel = CancelToken()
    try:
        return await asyncio.to_thread(generate, cancel)
    except asyncio.CancelledError:
        cancel.cancel()
        raise


def awaited(call: Callable[Concatenate[E, P], T]) -> Callable[Concatenate[E, P], Coroutine[Any, Any, T]]:
    """Return a method that does the same without blocking the event loop; cancelling the task stops the generation."""
    checked: Callable[..., T] = checks_arguments(call)

    @wraps(call)
    async def twin(engine: E, /, *args: P.args, **keywords: P.kwargs) -> T:
        stop = checked_value("cancel", CancelToken | None, keywords.get("cancel"))

        def generate(cancel: CancelToken) -> T:
            if stop is None:
                return checked(engine, *args, **{**keywords, "cancel": cancel})
            with stop.calling(cancel.cancel):
                return checked(engine, *args, **{**keywords, "cancel": stop if stop.cancelled else cancel})

        return await in_thread(generate)

    return twin


class AsyncStream(AsyncIterator[T]):
    """The tokens of a stream that a thread generates. Closing or dropping the iterator stops the generation.

    One task at a time may read it; a second one gets a SessionError.
    """

    def __init__(self, make_stream: Callable[[CancelToken], Stream[T]]) -> None:
        self._cancel = CancelToken()
        self._tokens = _tokens(make_stream, self._cancel)
        self._reading = threading.Lock()  # of threading, as two tasks may run in two event loops

    async def __anext__(self) -> T:
        if not self._reading.acquire(blocking=False):
            raise second_reader()
        try:
            return await anext(self._tokens)
        finally:
            self._reading.release()

    async def aclose(self) -> None:
        """Stop the generation; a task that is reading gets the end of the stream. Calling it again does nothing."""
        self._cancel.cancel()
        if self._reading.acquire(blocking=False):
            try:
                await self._tokens.aclose()
            finally:
                self._reading.release()


AsyncTokenStream = AsyncStream[TokenOutput]
"""The tokens of one text."""


class AsyncSampleStream(AsyncStream[SampleOutput]):
    """The tokens of several texts of one prompt; `generations` has all of them when the stream has ended."""

    def __init__(self, make_stream: "Callable[[CancelToken], SampleStream]") -> None:
        self._stream: SampleStream | None = None

        def made(cancel: CancelToken) -> "SampleStream":
            self._stream = make_stream(cancel)
            return self._stream

        super().__init__(made)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """What was generated so far; see SampleStream.generations. None before the first token is read."""
        return () if self._stream is None else self._stream.generations


async def _tokens(make_stream: Callable[[CancelToken], Stream[T]], cancel: CancelToken) -> AsyncGenerator[T]:
    """Generate in a thread and yield the tokens; the generation stops when the consumer stops."""
    import asyncio

    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[T | BaseException | None] = asyncio.Queue()

    def put(item: T | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the loop is closed, so nobody reads any more
            cancel.cancel()

    def work() -> None:
        try:
            for output in make_stream(cancel):
                put(output)
            put(None)
        except BaseException as error:  # the consumer gets it, whatever it is
            put(error)

    thread = threading.Thread(target=work, name="edgedec-stream", daemon=True)
    thread.start()
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        cancel.cancel()
