"""The responses of /v1/responses that later requests may refer to, in memory only, with a limit of bytes."""

import json
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from edgedec_apps.server.core.budget import MemoryBudget
from edgedec_apps.server.core.messages import pictures_of

_MOST_BYTES = 16_000_000
_PART = 8  # of the memory for requests


@dataclass(frozen=True, slots=True)
class Kept:
    """A response that is kept.

    Attributes:
        document: The response as it was sent.
        messages: The chat up to and with its answer, for the chat template, without the request's instructions.
        n_bytes: Bytes that this counts for.
    """

    document: dict[str, Any]
    messages: list[dict[str, Any]]
    n_bytes: int


class ResponseStore:
    """The latest responses. The oldest are dropped beyond the limit, and all of them where requests need the memory.

    Attributes:
        n_bytes: Bytes that the kept responses count for.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.n_bytes = 0
        self._budget = budget
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        budget.on_shortage = self.clear

    @property
    def n_most(self) -> int:
        """Most bytes that they may count for."""
        return min(_MOST_BYTES, self._budget.n_total // _PART)

    def put(self, document: dict[str, Any], messages: list[dict[str, Any]]) -> None:
        """Keep a response, if there is memory for it."""
        pictures = [part["image"] for part in pictures_of(messages)]
        n_bytes = 2 * len(json.dumps([document, messages], default=lambda _: ""))
        n_bytes += sum(len(picture) for picture in pictures if isinstance(picture, bytes))
        if n_bytes > self.n_most:
            return
        while self._kept and self.n_bytes + n_bytes > self.n_most:
            self.drop(next(iter(self._kept)))
        if self._budget.take_now(n_bytes, self.n_bytes):
            self.n_bytes += n_bytes
            self._kept[document["id"]] = Kept(document, messages, n_bytes)

    def get(self, response_id: str) -> Kept | None:
        """Return a response, or None where it is not kept (any more)."""
        return self._kept.get(response_id)

    def drop(self, response_id: str) -> bool:
        """Forget a response; return whether it was there."""
        removed = self._kept.pop(response_id, None)
        if removed is not None:
            self.n_bytes -= removed.n_bytes
            self._budget.give(removed.n_bytes)
        return removed is not None

    def clear(self) -> None:
        """Forget all responses."""
        for response_id in list(self._kept):
            self.drop(response_id)
