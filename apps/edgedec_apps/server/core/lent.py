"""An answer that a model is lent for: waiting for the model, the time limit, a client that disconnects."""

import asyncio
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger

from starlette.types import Receive, Scope, Send

from edgedec.errors import EdgedecError
from edgedec.progress import CancelToken
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.room import SHARE, Share
from edgedec_apps.server.core.sender import Sender
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.shelf.names import Named
from edgedec_apps.server.shelf.shelf import Lease
from edgedec_apps.server.shelf.slots import Slots

_LAST_WORD_S = 5.0
_LOG = getLogger("edgedec.server")


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
class Lending:
    """What answering a request needs once its model is there.

    Attributes:
        lease: The model.
        slots: The places for the model's requests.
        sender: Sends to the client.
        share: The request's memory.
        cancel: Is cancelled when the client disconnects, the time is over, or the server ends.
    """

    lease: Lease
    slots: Slots
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
    wanted: Wanted
    fields: Fields

    @abstractmethod
    async def respond(self, lending: Lending) -> None:
        """Answer the request. The lease may be released earlier than at the end."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer; where the client disconnects, the work stops at its next step."""
        cancel = CancelToken()
        sender = Sender(scope["path"], send, self.fields)
        work = asyncio.create_task(self._answer(sender, scope[SHARE], cancel))
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
        slots = self.service.shelf.place(named.recipe).slots
        with slots.preparing():
            lease = await self.service.shelf.take(
                named.recipe,
                n_ctx=self.wanted.n_ctx or named.n_ctx,
                keep_s=named.keep_s if keep_s is None else keep_s,
            )
        try:
            await self.respond(Lending(lease, slots, sender, share, cancel))
        finally:
            lease.release()


async def _wait_until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
