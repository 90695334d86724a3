"""Limits of connections: their number, the time of each request, and clients that close their half.

- A header must be complete within `header_timeout_s`, a body within `body_timeout_s`, and an answer generated and read
  within a little more than `timeout_s`.
- Beyond the limit of connections, a new one takes the place of one that waits for its client: the one that has waited
  longest for a header, else between two requests, else for a body. Where all connections have complete requests, the
  new one is refused.
- A client may close its half of the connection after its request (shutdown(SHUT_WR)) and still gets the answer. A
  client that disconnected looks the same at first, but its system answers what is sent with a reset.
"""

import asyncio
import socket
from enum import Enum
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.service import Service, refusal
from edgedec_apps.server.guard import Guard

_READ_BYTES = 16_384  # most bytes of one read, and of a body that the application has not read yet
_SLACK_S = 15.0  # more than the limits of the application, which answers requests that exceed them
_PROBE_S = 0.1
_TOO_SLOW = b"HTTP/1.1 408 Request Timeout\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class _Phase(Enum):
    """What a connection waits for, in the order in which they give way to a new one; ANSWER never gives way."""

    HEADER = 0
    BETWEEN = 1  # two requests
    BODY = 2
    ANSWER = 3


class Connection(H11Protocol):
    """One connection, with the limits of `service`; uvicorn creates it and gives the other arguments."""

    def __init__(self, service: Service, **options: Any) -> None:
        super().__init__(**options)
        self._service = service
        self._phase = _Phase.HEADER
        self._since_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._half_closed = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, that of another connection where there is no free one."""
        super().connection_made(transport)
        self._service.n_connections += 1
        if hasattr(transport, "max_size"):  # of a read; the default of 256 KiB would be 128 MB for 512 connections
            transport.max_size = _READ_BYTES
        self._enter(_Phase.HEADER)
        if not self._has_place():
            self.app = Guard(_no_place, self._service, ())

    def data_received(self, data: bytes) -> None:
        """Take bytes, and stop reading where enough of a body waits for the application."""
        super().data_received(data)
        if self.cycle is not None and len(self.cycle.body) > _READ_BYTES:
            self.flow.pause_reading()
        self._look(_Phase.HEADER)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless the client has closed its half."""
        self._stop_clock()
        super().on_response_complete()
        if self._half_closed and (self.cycle.response_complete or self.cycle.more_body):
            self.transport.close()
        if self.transport.get_write_buffer_size():
            self._look(_Phase.ANSWER)  # the client has not read all of it
        else:
            self._look(_Phase.HEADER if self.conn.trailing_data[0] else _Phase.BETWEEN)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep the connection of a client that closed its half after a complete request."""
        waits = self.cycle is not None and not self.cycle.response_complete
        if not waits or self.conn.their_state not in (h11.DONE, h11.MUST_CLOSE):
            return False
        if self.transport.get_extra_info("ssl_object") is not None:  # TLS ends in both directions together
            return False
        self._half_closed = True
        if not self.cycle.response_started and self.scope["http_version"] == "1.1":  # 1.0 knows no interim answers
            interim = h11.InformationalResponse(status_code=100, headers=[], reason=b"Continue")
            self.transport.write(self.conn.send(interim) or b"")
        self.loop.call_later(_PROBE_S, self._leave_if_reset)
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        super().connection_lost(exc)
        self._service.n_connections -= 1
        self._stop_clock()

    @property
    def _address(self) -> str | None:
        return self.client[0] if self.client else None

    def _has_place(self) -> bool:
        """Return whether there is a place for this connection, after closing another one where none is free."""
        settings = self._service.settings
        all_others = [other for other in self.connections if isinstance(other, Connection) and other is not self]
        others = [other for other in all_others if not other.transport.is_closing()]
        neighbours = [other for other in others if other._address == self._address]
        for group, most in ((neighbours, settings.n_per_address), (others, settings.n_connections)):
            if len([other for other in group if not other.transport.is_closing()]) < most:
                continue
            waiting = [other for other in group if other._phase is not _Phase.ANSWER]
            if not waiting:
                return False
            min(waiting, key=lambda other: (other._phase.value, other._since_s)).transport.close()
        return True

    def _look(self, without_request: _Phase) -> None:
        """Find out what the connection waits for now; without the beginning of a request it is `without_request`."""
        theirs = self.conn.their_state
        if theirs is h11.IDLE:
            self._enter(without_request)
        elif theirs is h11.SEND_BODY:
            self._enter(_Phase.BODY)
        elif self.cycle is not None and not self.cycle.response_complete:
            self._enter(_Phase.ANSWER)

    def _enter(self, phase: _Phase) -> None:
        """Begin to wait for something, with its time limit, which a part of it that arrives does not extend."""
        if phase is self._phase and self._timer is not None:
            return
        self._stop_clock()
        self._phase, self._since_s = phase, self.loop.time()
        settings = self._service.settings
        limits = {
            _Phase.HEADER: settings.header_timeout_s,
            _Phase.BODY: 2 * settings.body_timeout_s + _SLACK_S,
            _Phase.ANSWER: settings.timeout_s + _SLACK_S,
        }
        if phase in limits:  # between two requests uvicorn has its own time limit
            self._timer = self.loop.call_later(limits[phase], self._time_is_over)

    def _stop_clock(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_is_over(self) -> None:
        if self._phase is not _Phase.HEADER:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.transport.write(_TOO_SLOW)
            self.transport.close()

    def _leave_if_reset(self) -> None:
        """Check, until the answer is complete, whether the client of a half-closed connection is still there."""
        if self.transport.is_closing() or self.cycle.response_complete:
            return
        if self.transport.get_extra_info("socket").getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
            self.transport.abort()
        else:
            self.loop.call_later(_PROBE_S, self._leave_if_reset)


async def _no_place(scope: Scope, receive: Receive, send: Send) -> None:
    """Refuse a request on a connection beyond the limit."""
    what = "the server has no free connection; try again later"
    answer = refusal(scope["path"], ApiError(what, status=503, code="busy", retry_after_s=5))
    answer.headers["connection"] = "close"
    await answer(scope, receive, send)
