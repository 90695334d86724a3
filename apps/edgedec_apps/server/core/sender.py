"""Sends an answer to its client: one JSON object, or a stream, or an error in the place of either."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from starlette.types import Send

from edgedec.exact_json import dumps
from edgedec_apps.server.core.errors import problem_of
from edgedec_apps.server.core.fields import Fields

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
    named = f"event: {kind}\n" if kind else ""
    return f"{named}data: {data}\n\n".encode()
