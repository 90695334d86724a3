"""A generated answer: its wait in the queue and its texts, in one piece or as a stream."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.server.core.errors import closing_error, problem_of
from edgedec_apps.server.core.generation import (
    Begun,
    Encoded,
    Event,
    Finished,
    Opened,
    Piece,
    Reading,
    Tell,
    TextRequest,
    Turn,
    events,
    is_taken,
    run_in_thread,
)
from edgedec_apps.server.core.lent import Lending, Lent
from edgedec_apps.server.core.prompts import read_prompts
from edgedec_apps.server.core.room import Share
from edgedec_apps.server.core.sender import Sender, sse
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.shelf.request_queue import RequestQueue
from edgedec_apps.server.shelf.shelf import Lease

_COMMENT = b": the server is at work\n\n"  # which clients of server-sent events pass over


class Dialect(ABC):
    """The form of the answer to one request; what most forms of server-sent events do is done here."""

    media_type = "text/event-stream"
    """Media type of the stream."""
    tells_reading = False
    """Whether the stream tells how far a prompt is read."""
    streams: bool
    """Whether the answer comes as a stream."""

    def begun(self, begun: Begun) -> Iterable[bytes]:
        """Return what begins the stream, as soon as the request is taken: a comment."""
        return (_COMMENT,)

    def quiet(self) -> bytes:
        """Return what a stream sends while it has no news, so that no client or proxy gives up: a comment."""
        return _COMMENT

    def reading(self, reading: Reading) -> Iterable[bytes]:
        """Return what a report on the reading of a prompt adds to the stream."""
        return ()

    @abstractmethod
    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Return what a token adds to the stream."""

    @abstractmethod
    def finished(self, finished: Finished, queued_s: float) -> Iterable[bytes]:
        """Return what the end of a text adds to the stream."""

    def end(self, generations: list[Generation]) -> Iterable[bytes]:
        """Return what ends the stream: nothing, where finished() has sent the last event."""
        return ()

    def failed(self, error: BaseException) -> bytes:
        """Return the last part of a stream that an error ends: OpenAI's form of it."""
        return sse(problem_of(error).openai())

    @abstractmethod
    def whole(self, generations: list[Generation], queued_s: float) -> Mapping[str, Any]:
        """Return the answer in one piece; without texts, to a request that only wants the model to be loaded."""


Read = Callable[[Lease], tuple[TextRequest | None, Dialect]]
"""Reads a request's fields for the model that is lent: the texts that it wants, if any, and the form of its answer."""


@dataclass(frozen=True, slots=True)
class Reply(Lent):
    """The answer that a model writes.

    Attributes:
        read: Reads the request's fields once the model is there.
    """

    read: Read

    async def respond(self, lending: Lending) -> None:
        """Read the request's fields, generate and send; a text stops at its next step where the client disconnects."""
        lease, sender = lending.lease, lending.sender
        texts, dialect = self.read(lease)
        sender.dialect = dialect
        if texts is None:
            await sender.whole(200, dialect.whole([], 0.0))
            return
        work = _Work(self.service, lending.queue, lease, self.wanted.named.completed(texts), dialect)
        await work.generate(sender, lending.share, lending.cancel)


@dataclass(frozen=True, slots=True)
class _Work:
    """The texts of a request, from their prompts to the answer, in a dialect."""

    service: Service
    queue: RequestQueue
    lease: Lease
    request: TextRequest
    dialect: Dialect

    async def generate(self, sender: Sender, share: Share, cancel: CancelToken) -> None:
        """Send the events of the producer; place and model are free when the texts are complete, read or not."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        producer = asyncio.create_task(self._produce(queue, share, cancel))
        producer.add_done_callback(lambda _: queue.put_nowait(None))
        texts: dict[int, Generation] = {}
        queued_s = 0.0
        going = True
        try:
            while going:
                chunks: list[bytes] = []
                news = await _next_events(queue, sender.quiet_left_s(self.service.settings.quiet_s))
                if not news:
                    chunks.append(self.dialect.quiet())
                for event in news:
                    if isinstance(event, Begun):
                        begun = self.dialect.begun(event)
                        if self.dialect.streams:
                            await sender.begin()
                            chunks.extend(begun)
                    elif isinstance(event, Turn):
                        queued_s = event.queued_s
                    elif isinstance(event, Reading):
                        chunks.extend(self.dialect.reading(event))
                    elif isinstance(event, Piece) and self.dialect.streams:
                        chunks.extend(self.dialect.piece(event))
                    elif isinstance(event, Finished):
                        texts[event.index] = event.generation
                        chunks.extend(self.dialect.finished(event, queued_s) if self.dialect.streams else ())
                    going = event is not None
                if self.service.closing or any(map(_was_stopped, texts.values())):
                    raise closing_error()
                await sender.send(chunks)
            await producer
        finally:
            producer.cancel()
            await asyncio.wait({producer})
            if not producer.cancelled():
                producer.exception()  # raised above, or there is no client to answer
        generations = [texts[index] for index in sorted(texts)]
        if self.dialect.streams:
            await sender.send(self.dialect.end(generations))
            await sender.finish()
        else:
            await sender.whole(200, self.dialect.whole(generations, queued_s))

    async def _produce(self, queue: "asyncio.Queue[Event | None]", share: Share, cancel: CancelToken) -> None:
        try:
            with self.queue.preparing():
                engine = self.lease.loaded.engine
                prompts = await read_prompts(engine, self.request, share, cancel, self.service.settings.image_hosts)
                taken = await asyncio.to_thread(is_taken, engine, self.request, prompts)
            opened = tuple(prompt.opened for prompt in prompts for _ in range(self.request.n))
            begun = Begun(sum(len(prompt.token_ids) for prompt in prompts), opened)
            late = self.dialect.streams and not taken
            if not late:
                queue.put_nowait(begun)
            async with self.queue.turn() as queued_s:
                self.service.metrics.count_waiting(queued_s)
                queue.put_nowait(Turn(queued_s))
                work = partial(self._counted, prompts, cancel, begun if late else None)
                await run_in_thread(work, queue.put_nowait, cancel)
        finally:
            self.lease.release()

    def _counted(
        self, prompts: Sequence[Encoded], cancel: CancelToken, begun: Begun | None, tell: Tell
    ) -> Iterator[Event]:
        """Generate and count the texts; `begun` is yielded once the first of them is open."""
        tells = self.dialect.tells_reading and self.dialect.streams
        for event in events(self.lease.loaded.engine, self.request, prompts, cancel, tell if tells else None):
            if isinstance(event, Opened) and begun is not None:
                yield begun
                begun = None
            if isinstance(event, Finished):
                self.service.metrics.count_generation(event.generation)
            yield event


async def _next_events(queue: "asyncio.Queue[Event | None]", wait_s: float | None) -> list[Event | None]:
    """Wait `wait_s` seconds for an event; return it with those that came since, such as all tokens of a draft."""
    try:
        async with asyncio.timeout(wait_s):
            found = [await queue.get()]
    except TimeoutError:
        return []
    while not queue.empty():
        found.append(queue.get_nowait())
    return found


def _was_stopped(generation: Generation) -> bool:
    """Return whether the end of the server stopped a text; a client that disconnected would not read an answer."""
    return generation.finish_reason == "cancelled"
