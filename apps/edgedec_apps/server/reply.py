"""A generated answer: its wait in the queue, its time limit, a client that disconnects, in one piece or as a stream."""

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Any, Protocol

from starlette.types import Receive, Scope, Send

from edgedec.errors import EdgedecError
from edgedec.progress import CancelToken
from edgedec.sequence import Generation
from edgedec_apps.server.errors import closing_error, problem_of
from edgedec_apps.server.fields import Fields
from edgedec_apps.server.generation import Begun, Event, Finished, Piece, TextRequest, events, run_in_thread
from edgedec_apps.server.names import Named
from edgedec_apps.server.prompts import Encoded, read_prompts
from edgedec_apps.server.room import SHARE, Share
from edgedec_apps.server.service import Service
from edgedec_apps.server.shelf import Lease
from edgedec_apps.server.slots import Slots

_LAST_WORD_S = 5.0
_LOG = getLogger("edgedec.server")


class Dialect(Protocol):
    """The form of the answer to one request."""

    media_type: str
    """Media type of the stream."""

    streams: bool
    """Whether the answer comes as a stream."""

    def begun(self, begun: Begun) -> Iterable[bytes]:
        """Return what begins the stream."""

    def piece(self, piece: Piece) -> Iterable[bytes]:
        """Return what a token adds to the stream."""

    def finished(self, finished: Finished, queued_s: float) -> Iterable[bytes]:
        """Return what the end of a text adds to the stream."""

    def end(self, generations: list[Generation]) -> Iterable[bytes]:
        """Return what ends the stream."""

    def failed(self, error: BaseException) -> bytes:
        """Return the last part of a stream that an error ends."""

    def whole(self, generations: list[Generation], queued_s: float) -> Mapping[str, Any]:
        """Return the answer in one piece; without texts, to a request that only wants the model to be loaded."""


Read = Callable[[Lease], tuple[TextRequest | None, Dialect]]
"""Reads a request's fields for the model that is lent: the texts that it wants, if any, and the form of its answer."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The model that a request wants.

    Attributes:
        named: The model.
        n_ctx: The least tokens of its context; None for as many as its name has.
        keep_s: Seconds for which it stays loaded after the request; None for as many as its name has.
    """

    named: Named
    n_ctx: int | None = None
    keep_s: float | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request whose body has been parsed; an ASGI application.

    Attributes:
        service: The server's state.
        wanted: The model that the request wants.
        fields: The request's fields.
        read: Reads them once the model is there.
    """

    service: Service
    wanted: Wanted
    fields: Fields
    read: Read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Generate and send; where the client disconnects, the generation stops at its next step."""
        cancel = CancelToken()
        work = asyncio.create_task(self._answer(_Sender(scope["path"], send, self.fields), scope[SHARE], cancel))
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
                    await self._with_model(sender, share, cancel)
        except Exception as error:
            if not isinstance(error, EdgedecError | TimeoutError):
                _LOG.exception("an answer failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await sender.fail(error)

    async def _with_model(self, sender: "_Sender", share: Share, cancel: CancelToken) -> None:
        """Wait for the model, read the request's fields, and answer."""
        named, keep_s = self.wanted.named, self.wanted.keep_s
        slots = self.service.shelf.place(named.recipe).slots
        with slots.preparing():
            lease = await self.service.shelf.take(
                named.recipe,
                n_ctx=self.wanted.n_ctx or named.n_ctx,
                keep_s=named.keep_s if keep_s is None else keep_s,
            )
        try:
            texts, dialect = self.read(lease)
            sender.dialect = dialect
            if texts is None:
                await sender.whole(200, dialect.whole([], 0.0))
            else:
                work = _Work(self.service, slots, lease, named.completed(texts), dialect)
                await work.generate(sender, share, cancel)
        finally:
            lease.release()


@dataclass(frozen=True, slots=True)
class _Work:
    """The texts of a request, from their prompts to the answer, in a dialect."""

    service: Service
    slots: Slots
    lease: Lease
    request: TextRequest
    dialect: Dialect

    async def generate(self, sender: "_Sender", share: Share, cancel: CancelToken) -> None:
        """Send the events of the producer; place and model are free when the texts are complete, read or not."""
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        producer = asyncio.create_task(self._produce(queue, share, cancel))
        producer.add_done_callback(lambda _: queue.put_nowait(None))
        generations: list[Generation] = []
        queued_s = 0.0
        going = True
        try:
            while going:
                chunks: list[bytes] = []
                for event in await _next_events(queue):
                    if isinstance(event, Begun):
                        queued_s = event.queued_s
                        begun = self.dialect.begun(event)
                        chunks.extend(begun if self.dialect.streams else ())
                    elif isinstance(event, Piece) and self.dialect.streams:
                        chunks.extend(self.dialect.piece(event))
                    elif isinstance(event, Finished):
                        generations.append(event.generation)
                        chunks.extend(self.dialect.finished(event, queued_s) if self.dialect.streams else ())
                    going = event is not None
                if self.service.closing or (generations and _was_stopped(generations[-1])):
                    raise closing_error()
                await sender.send(chunks)
            await producer
        finally:
            producer.cancel()
            await asyncio.wait({producer})
            if not producer.cancelled():
                producer.exception()  # raised above, or there is no client to answer
        if self.dialect.streams:
            await sender.send(self.dialect.end(generations))
            await sender.finish()
        else:
            await sender.whole(200, self.dialect.whole(generations, queued_s))

    async def _produce(self, queue: "asyncio.Queue[Event | None]", share: Share, cancel: CancelToken) -> None:
        try:
            with self.slots.preparing():
                prompts = await read_prompts(self.lease.loaded.engine, self.request, share, cancel)
            async with self.slots.slot() as queued_s:
                self.service.metrics.count_waiting(queued_s)
                opened = tuple(prompt.opens_thinking for prompt in prompts for _ in range(self.request.n))
                queue.put_nowait(Begun(queued_s, sum(len(prompt.token_ids) for prompt in prompts), opened))
                await run_in_thread(lambda: self._counted(prompts, cancel), queue.put_nowait, cancel)
        finally:
            self.lease.release()

    def _counted(self, prompts: Sequence[Encoded], cancel: CancelToken) -> Iterator[Event]:
        token_ids = [prompt.token_ids for prompt in prompts]
        for event in events(self.lease.loaded.engine, self.request, token_ids, cancel):
            if isinstance(event, Finished):
                self.service.metrics.count_generation(event.generation)
            yield event


async def _next_events(queue: "asyncio.Queue[Event | None]") -> list[Event | None]:
    """Wait for an event, and return it with those that came since, such as all tokens of an accepted draft."""
    found = [await queue.get()]
    while not queue.empty():
        found.append(queue.get_nowait())
    return found


def _was_stopped(generation: Generation) -> bool:
    """Return whether the end of the server stopped a text; a client that disconnected would not read an answer."""
    return generation.finish_reason == "cancelled"


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class _Sender:
    """Sends to the client: the headers with the first bytes, so that an early error has its own status.

    An answer names in a header the fields of the request that were ignored.

    Attributes:
        dialect: The form of the answer; None until the request's fields are read.
    """

    def __init__(self, path: str, send: Send, fields: Fields) -> None:
        self.dialect: Dialect | None = None
        self._path = path
        self._send = send
        self._fields = fields
        self._started = False

    async def send(self, chunks: Iterable[bytes]) -> None:
        """Send a part of a stream."""
        data = b"".join(chunks)
        if not data:
            return
        assert self.dialect is not None, "a stream begins when its form is known"
        if not self._started:
            await self._start(200, {"content-type": self.dialect.media_type, "cache-control": "no-store"})
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

    async def fail(self, error: BaseException) -> None:
        """Send an error, as the answer or as the last part of the stream."""
        if self._started and self.dialect is not None:
            await self._send({"type": "http.response.body", "body": self.dialect.failed(error), "more_body": False})
            return
        problem = problem_of(error)
        await self.whole(problem.status, problem.document(self._path), problem.headers)

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self._started = True
        headers = self._fields.headers | dict(headers)
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
