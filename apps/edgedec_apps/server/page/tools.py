"""Tools for the web chat: `GET /page/tools` lists them, `POST /page/tools` runs one that the page asked about.

They run in the server's process, and only where its operator gave tool servers (--mcp).
"""

import asyncio
from contextlib import suppress

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec.progress import CancelToken
from edgedec_apps.server.core.answer import wait_with_client
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.budget import MEMORY, RequestMemory
from edgedec_apps.server.core.errors import ApiError, closing_error
from edgedec_apps.server.core.service import Service
from edgedec_apps.tools.offered import is_allowed
from edgedec_apps.tools.results import ToolResult

_CALL_BYTES = 32_000_000  # of memory: an answer as it comes, and its parts
_MOST_CALLS = 8  # at once


async def list_tools(request: Request, service: Service) -> Response:
    """List the tools: each with its definition in OpenAI's form, its server, and whether the page must ask."""
    offer = service.tools
    if offer is None:
        return JSONResponse({"tools": []})
    return JSONResponse(
        {
            "tools": [
                {"definition": tool.definition, "server": tool.server, "ask": not is_allowed(tool.name, offer.patterns)}
                for tool in offer.servers.tools
            ]
        }
    )


async def call_tool(request: Request, service: Service) -> Response:
    """Run a tool, by its `name` and with its `arguments` in JSON: "text", "failed" and "note".

    Raises:
        ApiError: There are no tools here (404), the request is malformed (400), or too many calls run (429).
    """
    offer = service.tools
    if offer is None:
        raise ApiError("this server has no tools; --mcp FILE gives it some", status=404)
    fields = await read_fields(request, service.settings)
    name, arguments = fields.required("name"), fields.text("arguments") or "{}"
    fields.end()
    if not isinstance(name, str):
        raise fields.refusal("name", "must be the name of a tool")
    if offer.n_running >= _MOST_CALLS:
        raise ApiError("too many tools run at once; try again later", status=429, code="busy", retry_after_s=5)
    memory: RequestMemory = request.scope[MEMORY]
    offer.n_running += 1
    try:
        async with memory.more(_CALL_BYTES):
            result = await _run(request, service, name, arguments)
    finally:
        offer.n_running -= 1
    return JSONResponse({"text": result.text, "failed": result.failed, "note": result.note})


async def _run(request: Request, service: Service, name: str, arguments: str) -> ToolResult:
    """Return what a tool answers; a client that disconnects, or a server that ends, cancels the call."""
    assert service.tools is not None
    cancel, loop = CancelToken(), asyncio.get_running_loop()
    call = asyncio.wrap_future(service.tools.servers.start_call(name, arguments))

    def stop() -> None:
        loop.call_soon_threadsafe(call.cancel)

    with service.running(cancel), cancel.calling(stop):
        try:
            await wait_with_client(request.receive, call)
        finally:
            call.cancel()
    with suppress(asyncio.CancelledError):
        return await call
    raise closing_error()
