"""Files for the web chat: `POST /page/pdf` returns the text of a PDF. Texts are read in the browser itself."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken
from edgedec_apps.documents.files import LEAST_READER_BYTES, READER_BYTES, Limits, is_pdf, missing_reader, read_pdf
from edgedec_apps.server.core.bodies import read_body
from edgedec_apps.server.core.budget import MEMORY, RequestMemory
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.service import Service

_PATIENCE_S = 20.0
_MOST_CHARACTERS = 1_000_000  # which the page keeps of the files of a message


async def pdf(request: Request, service: Service) -> Response:
    """Return the text of the PDF in the body: "text" (pages end in form feeds), "n_pages", and "cut".

    Where "cut" is true, the end of the text is missing.

    Raises:
        ApiError: No PDF can be read here (501); the body is no PDF, damaged, protected or without text (400), too large
            (413) or too slow (408); reading it takes too long (400), or there is no memory for that (413, 503).
    """
    _require_reader()
    data = await read_body(request, service.settings)
    if not is_pdf(data):
        raise ApiError("the file is not a PDF: it does not begin with %PDF-", code="invalid_pdf")
    memory: RequestMemory = request.scope[MEMORY]
    n_bytes = _memory(memory)
    async with memory.more(n_bytes):
        found = await _read(bytes(data), n_bytes, service)
    if "error" in found:
        raise ApiError(f"the PDF can't be read: {found['error']}", code="invalid_pdf")
    return JSONResponse(found)


def _require_reader() -> None:
    """Raise ApiError (501) where no PDF can be read."""
    if why := missing_reader():
        raise ApiError(f"{why}; attach the text itself", status=501, code="not_supported")


def _memory(memory: RequestMemory) -> int:
    """Return the bytes that the process may hold: as many as this request may still have, up to the most."""
    free = memory.budget.n_most - memory.n_bytes
    if free < LEAST_READER_BYTES:
        raise ApiError(
            f"reading a PDF takes at least {format_bytes(LEAST_READER_BYTES)} of memory, and this request may use "
            f"{format_bytes(max(0, free))} more; allow the server more (--memory), or attach the text itself",
            status=413,
            code="too_large",
        )
    return min(free, READER_BYTES)


async def _read(data: bytes, n_bytes: int, service: Service) -> dict[str, Any]:
    """Return what read_pdf returns; a server that stops ends the process."""
    cancel = CancelToken()
    with service.running(cancel):
        return await asyncio.to_thread(read_pdf, data, Limits(n_bytes, _PATIENCE_S, _MOST_CHARACTERS), cancel)
