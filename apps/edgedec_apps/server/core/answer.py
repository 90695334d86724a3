"""An answer to a request whose body has been read: the wait for its model, the time limit, a client that leaves, and
what is sent: one JSON object, or a stream, or an error in the place of either.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edgedec.api.engine import Engine
from edgedec.errors import EdgedecError
from edgedec.exact_json import dumps
from edgedec.progress import CancelToken
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.budget import MEMORY, RequestMemory, RequestQueue
from edgedec_apps.server.core.errors import problem_of
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import to_its_end
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.registry.models import asked_seconds
from edgedec_apps.server.registry.names import Named
from edgedec_apps.server.registry.registry import Reference

STREAM_HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""Headers of every stream: no proxy may hold it back, or compress it."""


class Sender:
    """Sends to the client: the headers with the first bytes, so that an early error has its own status.

    An answer names in a header the fields of the request that were ignored.

    Attributes:
        media_type: Media type of a stream, which is known when the request's fields are read.
        failed: Returns the last part of a stream that an error ends.
    """

    def __init__(self, path: str, send: Send, fields: Fields) -> None:
        self.media_type = ""
        self.failed: Callable[[BaseException], bytes] | None = None
        self._path = path
        self._send = send
        self._fields = fields
        self._started = False
        self._sent_s = 0.0

    async def begin(self) -> None:
        """Send the header of a stream, unless that was done before."""
        if not self._started:
            await self._start(200, {"content-type": self.media_type} | STREAM_HEADERS)
            self._sent_s = asyncio.get_running_loop().time()

    def quiet_left_s(self, quiet_s: float) -> float | None:
        """Return how long a stream may yet be silent, where `quiet_s` is the most; None before the stream begins."""
        return max(0.0, self._sent_s + quiet_s - asyncio.get_running_loop().time()) if self._started else None

    async def send(self, chunks: Iterable[bytes]) -> None:
        """Send a part of a stream."""
        data = b"".join(chunks)
        if not data:
            return
        await self.begin()
        await self._send({"type": "http.response.body", "body": data, "more_body": True})
        self._sent_s = asyncio.get_running_loop().time()

    async def finish(self) -> None:
        """End the stream."""
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    async def whole(
        self, status: int, document: Mapping[str, Any] | Sequence[Any], headers: Mapping[str, str] | None = None
    ) -> None:
        """Send one JSON object, or one list."""
        data = dumps(document).encode()
        sizes = {"content-type": "application/json", "content-length": str(len(data)), "cache-control": "no-store"}
        await self._start(status, sizes | dict(headers or {}))
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def fail(self, error: BaseException) -> None:
        """Send an error, as the answer or as the last part of the stream."""
        if self._started and self.failed is not None:
            await self._send({"type": "http.response.body", "body": self.failed(error), "more_body": False})
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
    return dumps(document).encode() + b"\n"


def sse(document: Mapping[str, Any] | str, kind: str = "") -> bytes:
    """Return an object, or a bare word, as a server-sent event, whose kind may be named.

    >>> sse({"n": 1}), sse("[DONE]"), sse({}, "ping")
    (b'data: {"n": 1}\\n\\n', b'data: [DONE]\\n\\n', b'event: ping\\ndata: {}\\n\\n')
    """
    data = document if isinstance(document, str) else dumps(document)
    head = f"event: {kind}\n" if kind else ""
    return f"{head}data: {data}\n\n".encode()


T = TypeVar("T")
_LAST_WORD_S = 5.0
_LOG = getLogger("edgedec.server")


@dataclass(frozen=True, slots=True)
class Job:
    """What answering a request needs once its model is there.

    Attributes:
        requested: The model's name, with what it stands for.
        reference: The model; it may be released before the end.
        queue: Where requests of the model wait for a place.
        sender: Sends to the client.
        memory: The request's memory.
        cancel: Is cancelled when the client disconnects, the time is over, or the server ends.
    """

    service: Service
    requested: Named
    reference: Reference
    queue: RequestQueue
    sender: Sender
    memory: RequestMemory
    cancel: CancelToken

    @property
    def engine(self) -> Engine:
        """The engine of the model."""
        return self.reference.loaded.engine

    async def in_thread(self, function: Callable[..., T], *values: Any, **options: Any) -> T:
        """Return what a function returns that runs in a thread.

        Where the task is cancelled, `cancel` is, too, and the end of the work is waited for.
        """
        return await to_its_end(asyncio.to_thread(function, *values, **options), self.cancel.cancel)


Respond = Callable[[Job], Awaitable[Mapping[str, Any] | Sequence[Any] | None]]
"""Returns the answer as JSON, or None where it has sent it; what takes long runs in a thread, and counts in a queue."""


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request whose body has been parsed; an ASGI application.

    Attributes:
        requested: The model that the request names.
        respond: Answers once the model is there.
    """

    service: Service
    requested: Named
    fields: Fields
    respond: Respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; where the client disconnects, the work stops at its next step."""
        cancel = CancelToken()
        sender = Sender(scope["path"], send, self.fields)
        work = asyncio.create_task(self._answer(sender, scope[MEMORY], cancel))
        try:
            await wait_with_client(receive, work)
        finally:
            cancel.cancel()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            if self.fields.ignored:
                _LOG.info("%s: these fields were ignored: %s", scope["path"], self.fields.ignored)

    async def _answer(self, sender: Sender, memory: RequestMemory, cancel: CancelToken) -> None:
        try:
            with self.service.running(cancel):
                async with asyncio.timeout(self.service.settings.timeout_s):
                    await self._with_model(sender, memory, cancel)
        except Exception as error:
            if not isinstance(error, EdgedecError | TimeoutError):
                _LOG.exception("an answer failed")
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORD_S):
                    await sender.fail(error)

    async def _with_model(self, sender: Sender, memory: RequestMemory, cancel: CancelToken) -> None:
        """Wait for the model, and answer."""
        model, registry = self.requested, self.service.registry
        queue = registry.entry(model.recipe).queue
        with queue.preparing():
            reference = await registry.acquire(model.recipe, n_ctx=model.n_ctx, keep_s=model.keep_s)
        try:
            document = await self.respond(Job(self.service, model, reference, queue, sender, memory, cancel))
            if document is not None:
                await sender.whole(200, document)
        finally:
            reference.release()


async def wait_with_client(receive: Receive, work: "asyncio.Future[Any]") -> None:
    """Return when work is done, or when the client has disconnected; the request's body must have been read."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    leaving = asyncio.create_task(gone())
    try:
        await asyncio.wait({work, leaving}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()


async def read_named(request: Request, service: Service) -> tuple[Fields, Named]:
    """Return a request's fields, and the model that its fields `model` and `keep_alive` ask for.

    Without `model` it is the server's first one. ollama's `keep_alive` says how long it stays.

    Raises:
        ApiError: The body is not one that read_fields takes, or the server ends or has no model of that name.
        RequestError: keep_alive is no duration.
        EdgedecError: A preset's file is damaged, or a folder can't be read.
    """
    fields = await read_fields(request, service.settings)
    model = await service.find(fields.text("model") or None)
    return fields, model.asked(asked_seconds(fields.take("keep_alive")))
