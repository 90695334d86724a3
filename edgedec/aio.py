"""Generations for an event loop: the work runs in a thread, tokens come back through the loop."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable

from edgedec.generate import TokenStream
from edgedec.progress import CancelToken
from edgedec.sequence import Generation, TokenOutput

__all__ = ["TokenOutput", "finish", "iterate"]

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


async def iterate(make_stream: MakeStream) -> AsyncIterator[TokenOutput]:
    """Yield a stream's tokens as they come from a thread; stops the generation when the consumer stops."""
    loop = asyncio.get_running_loop()
    cancel = CancelToken()
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
