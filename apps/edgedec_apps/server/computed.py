"""An answer that needs a model but no text of it: numbers of tokens, token ids, embeddings."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from edgedec_apps.server.lent import Lending, Lent

Compute = Callable[[Lending], Awaitable[Mapping[str, Any]]]
"""Reads the fields of a request and returns the answer; what takes long runs in a thread, and counts in the queue."""


@dataclass(frozen=True, slots=True)
class Computed(Lent):
    """The answer that `compute` returns."""

    compute: Compute

    async def respond(self, lending: Lending) -> None:
        """Compute the answer and send it."""
        await lending.sender.whole(200, await self.compute(lending))
