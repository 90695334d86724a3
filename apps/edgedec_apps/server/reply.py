"""An answer that is generated: its place in the queue, its time, a client that goes away, whole or as a stream."""

import asyncio
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from edgedec.api.engine import Engine
from edgedec.errors import EdgedecError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.server.errors import problem_of
from edgedec_apps.server.generation import Asked, Begun, Event, Finished, Piece, events, read_prompts, run_in_thread
from edgedec_apps.server.room import SHARE, Share
from edgedec_apps.server.service import Service, closing_error

_LAST_WORD_S = 5.0
_LOG = getLogger("edgedec.server")


class Dialect(Protocol):
    """The form of an answer, for one request."""

    media_type: str
    """Of the stream."""

    streams: bool
    """Whether the answer comes as a stream."""

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Return what a token adds to the stream."""

    def finished(self, finished: Finished, queued_s: float) -> Iterable[bytes]:
        """Return what the end of a text adds to the stream."""

    def end(self, generations: list[Generation]) -> Iterable[bytes]:
        """Return what ends the stream."""

    def failed(self, error: BaseException) -> bytes:
        """Return what tells of an error in the middle of the stream."""

    def whole(self, generations: list[Generation], queued_s: float) -> Mapping[str, Any]:
        """Return the answer in one piece."""


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to `asked` in a dialect; an ASGI application for one request whose body has been read."""

    service: Service
    engine: Engine
    asked: Asked
    dialect: Dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send; a client that goes away stops the generation at its next step."""
        cancel = CancelToken()
        work = asyncio.create_task(self._answer(_Sender(scope["path"], send), scope[SHARE], cancel))
        gone = asyncio.create_task(_wait_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancel.cancel()
            gone.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work

    async def _answer(self, sender: "_Sender", share: Share, cancel: CancelToken) -> None:
        try:
            with self.service.running(cancel):
                async with asyncio.timeout(self.service.settings.timeout_s):
                    await self._generate(sender, share, cancel)
        except Exception as error:
            if not isinstance(error, EdgedecError | TimeoutError):
                _LOG.exception("an answer failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await sender.fail(error, self.dialect)

    async def _generate(self, sender: "_Sender", share: Share, cancel: CancelToken) -> None:
        """Send what comes; the producer's place is free as soon as the text is there, however slowly it is read."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        producer = asyncio.create_task(self._produce(queue, share, cancel))
        producer.add_done_callback(lambda _: queue.put_nowait(None))
        generations: list[Generation] = []
        queued_s = 0.0
        going = True
        try:
            while going:
                chunks: list[bytes] = []
                for event in await _all_there_is(queue):
                    if isinstance(event, Begun):
                        queued_s = event.queued_s
                    elif isinstance(event, Piece) and self.dialect.streams:
                        chunks.extend(self.dialect.piece(event))
                    elif isinstance(event, Finished):
                        generations.append(event.generation)
                        chunks.extend(self.dialect.finished(event, queued_s) if self.dialect.streams else ())
                    going = event is not None
                if self.service.closing or (generations and _was_stopped(generations[-1])):
                    raise closing_error()
                await sender.send(chunks, self.dialect)
            await producer
        finally:
            producer.cancel()
            await asyncio.wait({producer})
            if not producer.cancelled():
                producer.exception()  # told already, or nobody is there to tell
        if self.dialect.streams:
            await sender.send(self.dialect.end(generations), self.dialect)
            await sender.finish()
        else:
            await sender.whole(200, self.dialect.whole(generations, queued_s))

    async def _produce(self, queue: "asyncio.Queue[Event | None]", share: Share, cancel: CancelToken) -> None:
        with self.service.slots.preparing():
            prompts = await read_prompts(self.engine, self.asked, share, cancel)
        async with self.service.slots.slot() as queued_s:
            self.service.metrics.count_waiting(queued_s)
            queue.put_nowait(Begun(queued_s))
            await run_in_thread(lambda: self._counted(prompts, cancel), queue.put_nowait, cancel)

    def _counted(self, prompts: Sequence[tuple[int, ...]], cancel: CancelToken) -> Iterator[Event]:
        for event in events(self.engine, self.asked, prompts, cancel):
            if isinstance(event, Finished):
                self.service.metrics.count_generation(event.generation)
            yield event


async def _all_there_is(queue: "asyncio.Queue[Event | None]") -> list[Event | None]:
    """Wait for something, and take what came with it: the tokens of an accepted draft come, and are sent, together."""
    found = [await queue.get()]
    while not queue.empty():
        found.append(queue.get_nowait())
    return found


def _was_stopped(generation: Generation) -> bool:
    """Return whether something other than the client, who would not read this, stopped a text."""
    return generation.finish_reason == "cancelled"


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Sender:
    """The way back to the client: headers with the first bytes, so that an early error has its status."""

    def __init__(self, path: str, send: Send) -> None:
        self._path = path
        self._send = send
        self._started = False

    async def send(self, chunks: Iterable[bytes], dialect: Dialect) -> None:
        """Send a part of a stream."""
        data = b"".join(chunks)
        if not data:
            return
        if not self._started:
            await self._start(200, {"content-type": dialect.media_type, "cache-control": "no-store"})
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(self, status: int, document: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> None:
        """Send one JSON object."""
        data = json.dumps(document).encode()
        sizes = {"content-type": "application/json", "content-length": str(len(data)), "cache-control": "no-store"}
        await self._start(status, sizes | dict(headers or {}))
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: BaseException, dialect: Dialect) -> None:
        """Tell of an error: as the answer, or as the last part of the stream."""
        if self._started:
            await self._send({"type": "http.response.body", "body": dialect.failed(error), "more_body": False})
            return
        problem = problem_of(error)
        await self.whole(problem.status, problem.document(self._path), problem.headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})


def json_line(document: Mapping[str, Any]) -> bytes:
    """Return an object as a line of JSON (NDJSON).

    >>> json_line({"done": True})
    b'{"done": true}\\n'
    """
    return json.dumps(document).encode() + b"\n"


def sse(document: Mapping[str, Any] | str) -> bytes:
    """Return an object, or a bare word, as a server-sent event.

    >>> sse({"n": 1}), sse("[DONE]")
    (b'data: {"n": 1}\\n\\n', b'data: [DONE]\\n\\n')
    """
    data = document if isinstance(document, str) else json.dumps(document)
    return f"data: {data}\n\n".encode()
