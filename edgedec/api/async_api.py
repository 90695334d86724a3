"""Generations for an event loop: the work runs in a thread, tokens come back through the loop."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable

from edgedec.decoding.generate import TokenStream
from edgedec.decoding.one_reader import second_reader
from edgedec.progress import CancelToken
from edgedec.sequence import Generation, TokenOutput

__all__ = ["AsyncTokenStream", "TokenOutput", "finish"]

MakeStream = Callable[[CancelToken], TokenStream]


async def finish(make_stream: MakeStream) -> Generation:
    """Run a stream to its end in a thread; when the task is cancelled, the generation is too."""
    cancel = CancelToken()

    def work() -> Generation:
        stream = make_stream(cancel)
        for _ in stream:
            pass
        return stream.generation

    try:
        return await asyncio.to_thread(work)
    except asyncio.CancelledError:
        cancel.cancel()
        raise


class AsyncTokenStream(AsyncIterator[TokenOutput]):
    """Tokens as they come from a thread. Closing or dropping it stops the generation.

    One task at a time reads it: a second one gets a SessionError.
    """

    def __init__(self, make_stream: MakeStream) -> None:
        self._cancel = CancelToken()
        self._tokens = _tokens(make_stream, self._cancel)
        self._reading = threading.Lock()  # two tasks may be of two event loops

    async def __anext__(self) -> TokenOutput:
        if not self._reading.acquire(blocking=False):
            raise second_reader()
        try:
            return await anext(self._tokens)
        finally:
            self._reading.release()

    async def aclose(self) -> None:
        """Stop the generation; a task that is reading comes to the stream's end. Calling it again does nothing."""
        self._cancel.cancel()
        if self._reading.acquire(blocking=False):
            try:
                await self._tokens.aclose()
            finally:
                self._reading.release()


async def _tokens(make_stream: MakeStream, cancel: CancelToken) -> AsyncGenerator[TokenOutput]:
    """Yield a stream's tokens as they come from a thread; stops the generation when the consumer stops."""
    loop = asyncio.get_running_loop()
    queue: asyncio.Queue[TokenOutput | BaseException | None] = asyncio.Queue()

    def put(item: TokenOutput | BaseException | None) -> None:
        try:
            loop.call_soon_threadsafe(queue.put_nowait, item)
        except RuntimeError:  # the loop is closed: nobody reads any more
            cancel.cancel()

    def work() -> None:
        try:
            for output in make_stream(cancel):
                put(output)
            put(None)
        except BaseException as error:  # handed to the consumer, whatever it is
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
