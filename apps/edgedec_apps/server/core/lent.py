"""The model that a request names, and an answer that it is lent for: the wait, the time limit, a client that leaves."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from edgedec.errors import EdgedecError
from edgedec.progress import CancelToken
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.room import SHARE, Share
from edgedec_apps.server.core.sender import Sender
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.shelf.keep_alive import asked_seconds
from edgedec_apps.server.shelf.names import Named
from edgedec_apps.server.shelf.request_queue import RequestQueue
from edgedec_apps.server.shelf.shelf import Lease

T = TypeVar("T")
_LAST_WORD_S = 5.0
_LOG = getLogger("edgedec.server")


@dataclass(frozen=True, slots=True)
class WantedModel:
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
class Lending:
    """What answering a request needs once its model is there.

    Attributes:
        lease: The model.
        queue: Where requests of the model wait for a place.
        sender: Sends to the client.
        share: The request's memory.
        cancel: Is cancelled when the client disconnects, the time is over, or the server ends.
    """

    lease: Lease
    queue: RequestQueue
    sender: Sender
    share: Share
    cancel: CancelToken


@dataclass(frozen=True, slots=True)
class Lent(ABC):
    """The answer to a request whose body has been parsed; an ASGI application. The kinds below say how it is answered.

    Attributes:
        service: The server's state.
        wanted: The model that the request wants.
        fields: The request's fields.
    """

    service: Service
    wanted: WantedModel
    fields: Fields

    @abstractmethod
    async def respond(self, lending: Lending) -> None:
        """Answer the request. The lease may be released earlier than at the end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; where the client disconnects, the work stops at its next step."""
        cancel = CancelToken()
        sender = Sender(scope["path"], send, self.fields)
        work = asyncio.create_task(self._answer(sender, scope[SHARE], cancel))
        gone = asyncio.create_task(wait_until_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancel.cancel()
            gone.cancel()
            if not work.done():
                work.cancel()
            with suppress(asyncio.CancelledError):
                await work
            if self.fields.ignored:
                _LOG.info("%s: these fields were ignored: %s", scope["path"], self.fields.ignored)

    async def _answer(self, sender: Sender, share: Share, cancel: CancelToken) -> None:
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

    async def _with_model(self, sender: Sender, share: Share, cancel: CancelToken) -> None:
        """Wait for the model, and answer."""
        named, keep_s = self.wanted.named, self.wanted.keep_s
        queue = self.service.shelf.place(named.recipe).queue
        with queue.preparing():
            lease = await self.service.shelf.take(
                named.recipe,
                n_ctx=self.wanted.n_ctx or named.n_ctx,
                keep_s=named.keep_s if keep_s is None else keep_s,
            )
        try:
            await self.respond(Lending(lease, queue, sender, share, cancel))
        finally:
            lease.release()


async def wait_until_gone(receive: Receive) -> None:
    """Return when the client has disconnected; the request's body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def read_wanted(request: Request, service: Service) -> tuple[Fields, WantedModel]:
    """Return a request's fields, and the model that its fields `model` and `keep_alive` ask for.

    Without `model` it is the server's first one. ollama's `keep_alive` says how long it stays.

    Raises:
        ApiError: The body is not one that read_fields takes, or the server ends or has no model of that name.
        RequestError: keep_alive is no duration.
        EdgedecError: A preset's file is damaged, or a folder can't be read.
    """
    fields = await read_fields(request, service.settings)
    named = await service.find(fields.text("model") or None)
    return fields, WantedModel(named, keep_s=asked_seconds(fields.take("keep_alive")))


Compute = Callable[[Lending], Awaitable[Mapping[str, Any] | Sequence[Any]]]
"""Reads the fields of a request and returns the answer; what takes long runs in a thread, and counts in the queue."""


@dataclass(frozen=True, slots=True)
class Computed(Lent):
    """The answer that `compute` returns."""

    compute: Compute

    async def respond(self, lending: Lending) -> None:
        """Compute the answer and send it."""
        await lending.sender.whole(200, await self.compute(lending))


async def until_done(work: Coroutine[Any, Any, T], lending: Lending) -> T:
    """Return the result of a thread; where the task is cancelled, the work is, too, and its end is waited for."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        lending.cancel.cancel()
        await asyncio.wait({task})
        task.exception()  # nobody waits for it
        raise
