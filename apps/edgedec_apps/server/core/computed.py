"""An answer that needs a model but no text of it: numbers of tokens, token ids, embeddings."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from edgedec_apps.server.core.lent import Lending, Lent

T = TypeVar("T")
Compute = Callable[[Lending], Awaitable[Mapping[str, Any]]]
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
