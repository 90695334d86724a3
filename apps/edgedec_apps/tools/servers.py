"""All tool servers of a chat or a server, for any thread: which tools they have, and calls of them.

The connections live in a thread of their own with its event loop. MCP's SDK is imported when there are servers.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import CancelledError as FutureCancelledError
from concurrent.futures import Future
from contextlib import suppress
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from edgedec.errors import CancelledError, EdgedecError, RequestError, RuntimeUnavailableError
from edgedec.plugins import install_command
from edgedec.progress import CancelToken
from edgedec_apps.tools.configuration import Server
from edgedec_apps.tools.offered import Listed, Tool, offered
from edgedec_apps.tools.results import MOST_CHARACTERS, ToolResult, as_result

if TYPE_CHECKING:
    from edgedec_apps.tools.link import Link

T = TypeVar("T")
_CLOSE_S = 15.0


class ToolServers:
    """The tool servers, which begin to connect at once; `close` ends them.

    Args:
        servers: Where they are, at least one.

    Raises:
        RuntimeUnavailableError: MCP's SDK is not installed.
    """

    def __init__(self, servers: Sequence[Server]) -> None:
        if find_spec("mcp") is None:
            raise RuntimeUnavailableError(f"tool servers need MCP's SDK, which is missing: {install_command('mcp')}")
        self.tools: tuple[Tool, ...] = ()
        self.notes: list[str] = []
        """A sentence for each server that can't be used, and each tool that is left out."""
        from edgedec_apps.tools.link import Link  # here, as it imports the SDK

        self._links = {server.name: Link(server) for server in servers}
        for name in ("mcp", "httpx2", "httpcore2"):
            logging.getLogger(name).addHandler(logging.NullHandler())  # else what a server does wrong fills the screen
        loop = asyncio.new_event_loop()
        self._loop: asyncio.AbstractEventLoop | None = loop  # None once they are closed
        threading.Thread(target=_run, args=(loop,), name="edgedec-tools", daemon=True).start()
        self._listing = self._submit(self._list_all())

    def wait(self, cancel: CancelToken) -> None:
        """Wait until every server has listed its tools, or failed.

        Raises:
            CancelledError: The token was cancelled.
        """
        _result(self._listing, cancel)

    def when_listed(self, tell: Callable[[list[str]], None]) -> None:
        """Call `tell` with the notes, in another thread, once every server has listed its tools, or failed."""
        self._listing.add_done_callback(lambda listing: None if listing.cancelled() else tell(self.notes))

    def find(self, name: str) -> Tool | None:
        """Return the tool that a model calls by this name."""
        return next((tool for tool in self.tools if tool.name == name), None)

    def call(self, name: str, arguments: str, cancel: CancelToken, most: int = MOST_CHARACTERS) -> ToolResult:
        """Return what a tool answers to arguments in JSON; what goes wrong is an answer that says so.

        Raises:
            CancelledError: The token was cancelled; the server is told.
        """
        return _result(self.start_call(name, arguments, most), cancel)

    def start_call(self, name: str, arguments: str, most: int = MOST_CHARACTERS) -> "Future[ToolResult]":
        """Begin a call, as call() makes it; cancelling the future cancels it."""
        tool = self.find(name)
        try:
            parsed = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            parsed = None
        if tool is None or self._loop is None:
            names = ", ".join(each.name for each in self.tools) or "none"
            return _done(ToolResult(f"There is no tool {name!r:.80}; known: {names}", failed=True))
        if not isinstance(parsed, dict):
            return _done(ToolResult("The arguments must be a JSON object.", failed=True))
        return self._submit(self._call(tool, parsed, most))

    def close(self) -> None:
        """End all connections, and the programs behind them."""
        if self._loop is None:
            return
        ended = self._submit(_together([link.close for link in self._links.values()]))
        with suppress(TimeoutError, FutureCancelledError):  # a program that can't be ended is left to the system
            ended.result(_CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop = None

    async def _list_all(self) -> None:
        lists = await asyncio.gather(*(self._list(link) for link in self._links.values()))
        tools, left_out = offered(list(zip(self._links, lists, strict=True)))
        self.tools = tuple(tools)
        self.notes += left_out

    async def _list(self, link: "Link") -> list[Listed]:
        try:
            return await link.listed()
        except EdgedecError as error:
            self.notes.append(str(error))
            return []

    async def _call(self, tool: Tool, arguments: dict[str, Any], most: int) -> ToolResult:
        try:
            return as_result(await self._links[tool.server].call(tool.listed.name, arguments), most)
        except EdgedecError as error:
            return ToolResult(f"The call failed: {error}", failed=True, note=str(error))

    def _submit(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        if self._loop is None:
            work.close()
            raise RequestError("the tool servers are closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    try:
        loop.run_forever()
        loop.run_until_complete(asyncio.sleep(0))  # pipes of programs are closed by callbacks
    finally:
        loop.close()


async def _together(works: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> None:
    await asyncio.gather(*(work() for work in works), return_exceptions=True)


def _done(result: ToolResult) -> "Future[ToolResult]":
    future = Future[ToolResult]()
    future.set_result(result)
    return future


def _result(future: "Future[T]", cancel: CancelToken) -> T:
    """Wait for a result (CancelledError where `cancel` comes first)."""
    with cancel.calling(future.cancel):
        if cancel.cancelled:
            future.cancel()
        try:
            return future.result()
        except FutureCancelledError as error:
            raise CancelledError("interrupted") from error
