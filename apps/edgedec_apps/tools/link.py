"""The connection to one tool server: it is made when it is needed, and again after it broke."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx2
from mcp import Client, types
from mcp.client._transport import TransportStreams
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.exceptions import MCPError
from pydantic import TypeAdapter, ValidationError

import edgedec
from edgedec.errors import EdgedecError, RequestError
from edgedec_apps.tools.configuration import Address, Server
from edgedec_apps.tools.offered import MOST_TOOLS, Listed
from edgedec_apps.tools.stdio import MOST_LINE_BYTES, Ending, program_streams

CONNECT_S = 30.0
"""Seconds in which a tool server must say which tools it has."""
CALL_S = 120.0
"""Seconds in which a tool must answer."""
_MOST_PAGES = 20
_ANSWER: TypeAdapter[Any] = TypeAdapter(types.CallToolResult | types.InputRequiredResult)


class Link:
    """A tool server, for the tasks of one event loop."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Client] | None = None
        self._ending = Ending()
        self._over = asyncio.Event()

    async def listed(self) -> list[Listed]:
        """Return the tools that the server lists.

        Raises:
            EdgedecError: It can't be reached, or does not answer as MCP says.
        """
        client = await self._connected()
        try:
            async with asyncio.timeout(CONNECT_S):
                tools = await _all_tools(client)
                return [Listed(each.name, each.description or each.title or "", each.input_schema) for each in tools]
        except Exception as error:
            raise self._error(error, "does not list its tools") from error

    async def call(self, name: str, arguments: dict[str, Any]) -> types.CallToolResult:
        """Return what a tool answers; a cancelled task cancels the call.

        The answer is not checked against the schema that the server gives for it: patterns of a foreign schema could
        keep this process busy for ever.

        Raises:
            EdgedecError: The server can't be reached, the time is over, or the answer is none.
        """
        client = await self._connected()
        parameters = types.CallToolRequestParams(name=name, arguments=arguments)
        try:
            async with asyncio.timeout(CALL_S):
                request = types.CallToolRequest(params=parameters)
                answer = await client.session.send_request(request, _ANSWER, 2 * CALL_S)
        except Exception as error:
            if isinstance(error, TimeoutError):
                self._ending.event.set()  # a server that hangs is started anew for the next call
            raise self._error(error, f"did not answer the call of {name!r:.80}") from error
        if not isinstance(answer, types.CallToolResult):
            raise RequestError(f"the tool {name!r:.80} asks back, which is not supported here")
        return answer

    async def close(self) -> None:
        """End the connection, and a program that was started."""
        self._over.set()
        if self._task is not None:
            await asyncio.wait({self._task})

    async def _connected(self) -> Client:
        """Return the client of a connection that stands, after connecting where there is none."""
        if self._ready is None or self._ending.event.is_set() or (self._task is not None and self._task.done()):
            if self._task is not None:
                await asyncio.wait({self._task})
            self._ending = Ending()
            self._ready = asyncio.get_running_loop().create_future()
            self._task = asyncio.create_task(self._hold(self._ready, self._ending))
        ready, ending = self._ready, asyncio.ensure_future(self._ending.event.wait())
        waits: list[asyncio.Future[Any]] = [ready, ending]
        await asyncio.wait(waits, timeout=CONNECT_S, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if ready.done():
            return ready.result()
        if self._task is not None:
            self._task.cancel()  # the session would go on waiting for a program that has ended
        raise self._error(TimeoutError(), "can't be used" if self._ending.event.is_set() else "does not answer")

    async def _hold(self, ready: asyncio.Future[Client], ending: Ending) -> None:
        """Keep a connection in a task of its own, as the SDK wants it, until it ends."""
        info = types.Implementation(name="edgedec", version=edgedec.__version__)
        try:
            streams = _streams(self.server, ending)
            async with Client(streams, client_info=info, read_timeout_seconds=CONNECT_S, cache=None) as client:
                ready.set_result(client)
                waits = [asyncio.create_task(event.wait()) for event in (self._over, ending.event)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                for wait in waits:
                    wait.cancel()
        except BaseException as error:
            if not ready.done():
                ready.set_exception(self._error(error, "can't be used"))
                ready.exception()  # nobody may wait for it any more
        finally:
            ending.event.set()

    def _error(self, error: BaseException, what: str) -> EdgedecError:
        """Return the error to raise for another one: its message names this server, what it did, and why."""
        if isinstance(error, EdgedecError):
            return error
        return RequestError(f"the tool server {self.server.name} {what}: {self._ending.reason or _sentence(error)}")


@asynccontextmanager
async def _streams(server: Server, ending: Ending) -> AsyncIterator[TransportStreams]:
    """Yield the streams of a server's connection."""
    if isinstance(server, Address):
        limits = httpx2.Timeout(CONNECT_S, read=CALL_S)
        async with (
            httpx2.AsyncClient(headers=dict(server.headers), timeout=limits, transport=_Bounded()) as client,
            streamable_http_client(server.url, http_client=client) as streams,
        ):
            yield streams
    else:
        async with program_streams(server, ending) as streams:
            yield streams


class _Bounded(httpx2.AsyncHTTPTransport):
    """HTTP whose answers have at most MOST_LINE_BYTES; the SDK bounds each event of a stream itself."""

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        """Return the answer, with a body that ends with an error where it is too long."""
        request.headers["accept-encoding"] = "identity"  # a small body must not become a large one
        reply = await super().handle_async_request(request)
        if not reply.headers.get("content-type", "").startswith("text/event-stream"):
            assert isinstance(reply.stream, httpx2.AsyncByteStream)
            reply.stream = _BoundedBody(reply.stream)
        return reply


class _BoundedBody(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        n_bytes = 0
        async for chunk in self._inner:
            n_bytes += len(chunk)
            if n_bytes > MOST_LINE_BYTES:
                raise httpx2.ReadError(f"the answer has more than {MOST_LINE_BYTES // 1_000_000} MB")
            yield chunk

    async def aclose(self) -> None:
        await self._inner.aclose()


async def _all_tools(client: Client) -> Sequence[types.Tool]:
    """Return the tools of all pages of a list, and not many more than a model gets."""
    tools, cursor = list[types.Tool](), None
    for _ in range(_MOST_PAGES):
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if cursor is None or len(tools) > MOST_TOOLS:
            break
    return tools[: MOST_TOOLS + 1]


def _sentence(error: BaseException) -> str:
    """Return what went wrong, of the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError | asyncio.CancelledError):
        return "the time is over"
    if isinstance(error, ValidationError):
        return "what it sends is not as MCP says"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, MCPError):
        return str(error)[:300]
    return f"{type(error).__name__}: {error}"[:300]
