"""ollama's interface: /api/chat and /api/generate, and the addresses that are not supported."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from edgedec_apps.server.core.answer import Job
from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.reply import Dialect, written
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama import requests
from edgedec_apps.server.ollama.forms import Kind, OllamaForm, empty_answer
from edgedec_apps.server.registry.keep_alive import asked_seconds

_TEXTS = {"chat": ("messages",), "generate": ("prompt", "suffix")}


async def chat(request: Request, service: Service) -> ASGIApp:
    """Answer a chat."""
    return await _answer(request, service, "chat")


async def generate(request: Request, service: Service) -> ASGIApp:
    """Answer a prompt, or continue it."""
    return await _answer(request, service, "generate")


async def push(request: Request, service: Service) -> Response:
    """Raise ApiError: models are not published from here."""
    raise ApiError("/api/push is not supported: edgedec publishes no models", status=501, code="not_supported")


async def _answer(request: Request, service: Service, kind: Kind) -> ASGIApp:
    fields: Fields = await read_fields(request, service.settings)
    named = await service.find(str(fields.required("model")))
    options, n_ctx = requests.read_options(fields.object("options"))
    keep_s = asked_seconds(fields.take("keep_alive"))
    if keep_s == 0 and not any(fields.has(name) for name in _TEXTS[kind]):
        await service.registry.unload(lambda entry: entry.recipe == named.recipe)
        return JSONResponse(empty_answer(kind, named.name, "unload"))

    def read(job: Job) -> tuple[TextRequest | None, Dialect]:
        engine = job.engine
        if kind == "chat":
            texts, delivery = requests.read_chat(fields, options, engine)
        else:
            texts, delivery = requests.read_generate(fields, options, engine)
        splitter = None if texts is None else texts.splitter(engine)
        return texts, OllamaForm(kind, named.name, delivery, engine.tokenizer, splitter, job.reference.load_s)

    return written(service, named.asked(keep_s, n_ctx), fields, read)
