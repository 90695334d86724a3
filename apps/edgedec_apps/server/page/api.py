"""The web chat's own endpoints: the text of a PDF, the passages of long files, tools, and models to fetch."""

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec.load_options import ResolveOptions
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken
from edgedec_apps.documents.asking import Asking
from edgedec_apps.documents.files import (
    LEAST_READER_BYTES,
    READER_BYTES,
    Document,
    Limits,
    is_pdf,
    missing_reader,
    read_pdf,
)
from edgedec_apps.documents.pdf_text import PAGE_BREAK
from edgedec_apps.server.core.answer import Answer, Job, read_named, wait_with_client
from edgedec_apps.server.core.bodies import read_body, read_fields
from edgedec_apps.server.core.budget import MEMORY, RequestMemory
from edgedec_apps.server.core.errors import ApiError, closing_error
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.messages import read_messages
from edgedec_apps.server.core.prompts import tokenizer_bytes
from edgedec_apps.server.core.service import Service
from edgedec_apps.tools.offered import is_allowed
from edgedec_apps.tools.results import ToolResult
from edgedec_models.cache import list_models
from edgedec_models.catalogue import load_catalogue
from edgedec_models.fetching.offline import offline_reason

_PATIENCE_S = 20.0
_MOST_CHARACTERS = 1_000_000  # which the page keeps of the files of a message


async def pdf(request: Request, service: Service) -> Response:
    """Return the text of the PDF in the body: "text" (pages end in form feeds), "n_pages", and "cut".

    Where "cut" is true, the end of the text is missing.

    Raises:
        ApiError: No PDF can be read here (501); the body is no PDF, damaged, protected or without text (400), too large
            (413) or too slow (408); reading it takes too long (400), or there is no memory for that (413, 503).
    """
    if why := missing_reader():
        raise ApiError(f"{why}; attach the text itself", status=501, code="not_supported")
    data = await read_body(request, service.settings)
    if not is_pdf(data):
        raise ApiError("the file is not a PDF: it does not begin with %PDF-", code="invalid_pdf")
    memory: RequestMemory = request.scope[MEMORY]
    free = memory.budget.n_most - memory.n_bytes
    if free < LEAST_READER_BYTES:
        raise ApiError(
            f"reading a PDF takes at least {format_bytes(LEAST_READER_BYTES)} of memory, and this request may use "
            f"{format_bytes(max(0, free))} more; allow the server more (--memory), or attach the text itself",
            status=413,
            code="too_large",
        )
    n_bytes = min(free, READER_BYTES)  # which the process may hold
    limits, cancel = Limits(n_bytes, _PATIENCE_S, _MOST_CHARACTERS), CancelToken()
    async with memory.more(n_bytes):
        with service.running(cancel):
            read = await asyncio.to_thread(read_pdf, bytes(data), limits, cancel)
    if "error" in read:
        raise ApiError(f"the PDF can't be read: {read['error']}", code="invalid_pdf")
    return JSONResponse(read)


_CHARACTER_BYTES = 16  # of what a search holds of a text: passages, and prompts of them


async def passages(request: Request, service: Service) -> Answer:
    """Return a message about files: "content" has the passages that match it best, and "note" says which.

    Both are null where the files fit the context whole, behind the earlier `messages`.

    Raises:
        ApiError: The request is malformed (400).
        PromptTooLongError: The files are too long, and nothing in them matches the question.
    """
    fields, model = await read_named(request, service)
    earlier = fields.each("messages")
    before = read_messages(earlier) if earlier else []
    documents = [_document(file) for file in fields.each("files")]
    question = fields.text("question") or None
    fields.end()

    async def compute(job: Job) -> dict[str, Any]:
        engine, texts = job.engine, [document.text for document in documents]
        asking = Asking(engine, before=before, n_answer=engine.n_ctx // 2, with_names=True)  # half is for what follows
        n_bytes = await tokenizer_bytes([*texts, question or ""]) + _CHARACTER_BYTES * sum(map(len, texts))
        async with job.memory.more(n_bytes):
            content, passages = await job.in_thread(asking.about, documents, question, job.cancel)
        if passages is None:
            return {"content": None, "note": None}
        return {"content": content, "note": passages.line(", ".join(each.name for each in documents), engine.n_ctx)}

    return Answer(service, model, fields, compute)


def _document(file: Fields) -> Document:
    name, text = file.text("name") or "file", file.text("text") or ""
    file.end()
    return Document(name, text, is_paged=PAGE_BREAK in text)


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
    with service.running(cancel), cancel.calling(lambda: loop.call_soon_threadsafe(call.cancel)):
        try:
            await wait_with_client(request.receive, call)
        finally:
            call.cancel()
    with suppress(asyncio.CancelledError):
        return await call
    raise closing_error()


async def offered(request: Request, service: Service) -> Response:
    """List the models of the catalogue that were tried with edgedec: "name", "note", "n_bytes" and "n_there".

    "n_there" counts the bytes on this machine, of a download that was cut off, too. Where nothing may be fetched, as
    with --offline, the list has only models that are here.
    """
    is_offline = offline_reason(ResolveOptions(offline=service.settings.offline)) is not None
    return JSONResponse({"models": await asyncio.to_thread(lambda: list(_offers(is_offline)))})


def _offers(is_offline: bool) -> Iterator[dict[str, Any]]:
    stored = {model.name: model for model in list_models()}
    for entry in load_catalogue().values():
        model = stored.get(entry.name)
        if entry.tried and (not is_offline or (model is not None and model.complete)):
            facts = {"name": entry.name, "note": entry.note, "n_bytes": entry.size_bytes}
            yield facts | {"n_there": 0 if model is None else model.size_bytes}
