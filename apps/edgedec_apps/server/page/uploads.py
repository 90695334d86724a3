"""Files for the web chat: `POST /page/pdf` returns the text of a PDF. Texts are read in the browser itself."""

import asyncio
import json
import subprocess
import sys
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken
from edgedec_apps.server.core.bodies import read_body
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.room import SHARE, Share
from edgedec_apps.server.core.service import Service, endpoint
from edgedec_runtimes.shared.child_environment import child_environment

_MODULE = "edgedec_apps.server.page.pdf_text"
_PATIENCE_S = 20.0
_LEAST_BYTES = 48_000_000  # of the process that reads a PDF
MOST_BYTES = 256_000_000
"""The most bytes that the process may hold which reads a PDF."""


def routes() -> list[BaseRoute]:
    """Return the route of the web chat's files."""
    return [Route("/page/pdf", endpoint(pdf), methods=["POST"])]


async def pdf(request: Request, service: Service) -> Response:
    """Return the text of the PDF in the body: "text", "n_pages", and "cut", whether the end of the text is missing.

    Raises:
        ApiError: No PDF can be read here (501); the body is no PDF, damaged, protected or without text (400), too large
            (413) or too slow (408); reading it takes too long (400), or there is no memory for that (413, 503).
    """
    _require_reader()
    data = await read_body(request, service.settings)
    if not data[:1024].lstrip().startswith(b"%PDF-"):
        raise ApiError("the file is not a PDF: it does not begin with %PDF-", code="invalid_pdf")
    share: Share = request.scope[SHARE]
    n_bytes = _memory(service, share)
    async with share.more(n_bytes):
        found = await _read(bytes(data), n_bytes, service)
    if "error" in found:
        raise ApiError(f"the PDF can't be read: {found['error']}", code="invalid_pdf")
    return JSONResponse(found)


def _require_reader() -> None:
    """Raise ApiError (501) where no PDF can be read."""
    if why := missing_reader():
        raise ApiError(f"{why}; attach the text itself", status=501, code="not_supported")


def missing_reader() -> str | None:
    """Return why no PDF can be read here; None where one can."""
    return "what is packed into one program can't read PDFs" if getattr(sys, "frozen", False) else None


def _memory(service: Service, share: Share) -> int:
    """Return the bytes that the process may hold: as many as this request may still have, up to the most."""
    free = service.room.n_most - share.n_bytes
    if free < _LEAST_BYTES:
        raise ApiError(
            f"reading a PDF takes at least {format_bytes(_LEAST_BYTES)} of memory, and this request may use "
            f"{format_bytes(max(0, free))} more; allow the server more (--memory), or attach the text itself",
            status=413,
            code="too_large",
        )
    return min(free, MOST_BYTES)


async def _read(data: bytes, n_bytes: int, service: Service) -> dict[str, Any]:
    """Return what read_pdf returns; a server that stops ends the process."""
    cancel = CancelToken()
    with service.running(cancel):
        return await asyncio.to_thread(read_pdf, data, n_bytes, cancel)


def read_pdf(data: bytes, n_bytes: int, cancel: CancelToken) -> dict[str, Any]:
    """Return what a process that may hold `n_bytes` says of a PDF; an "error" where it ends without a word."""
    process = subprocess.Popen(
        command(n_bytes),
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process, cancel.calling(process.kill):
        if cancel.cancelled:
            process.kill()
        try:
            out, _ = process.communicate(data, timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"error": f"it took longer than {_PATIENCE_S:g} s to read"}
        except BaseException:
            process.kill()
            raise
    try:
        found: dict[str, Any] = json.loads(out)
    except ValueError:
        return {"error": f"it ended the process that reads it (exit status {process.returncode})"}
    return found


def command(n_bytes: int) -> list[str]:
    """Return the command of the process that reads a file, which may hold `n_bytes` bytes of memory."""
    return [sys.executable, "-P", "-m", _MODULE, str(n_bytes)]
