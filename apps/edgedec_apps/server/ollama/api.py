"""ollama's interface: /api/chat and /api/generate, and the addresses that are not supported."""

from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgedec_apps.server.core.bodies import read_fields
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.lent import WantedModel
from edgedec_apps.server.core.parts import Splitter
from edgedec_apps.server.core.reply import Dialect, Reply
from edgedec_apps.server.core.service import Service, endpoint
from edgedec_apps.server.ollama import changes, models, requests
from edgedec_apps.server.ollama.forms import Kind, OllamaForm, empty_answer
from edgedec_apps.server.shelf.keep_alive import asked_seconds
from edgedec_apps.server.shelf.shelf import Lease

_TEXTS = {"chat": ("messages",), "generate": ("prompt", "suffix")}


def routes() -> list[BaseRoute]:
    """Return the routes below /api."""
    return [
        Route("/api/chat", endpoint(chat), methods=["POST"]),
        Route("/api/generate", endpoint(generate), methods=["POST"]),
        Route("/api/push", endpoint(push), methods=["POST"]),
        *models.routes(),
        *changes.routes(),
    ]


async def chat(request: Request, service: Service) -> Response:
    """Answer a chat."""
    return await _answer(request, service, "chat")


async def generate(request: Request, service: Service) -> Response:
    """Answer a prompt, or continue it."""
    return await _answer(request, service, "generate")


async def push(request: Request, service: Service) -> Response:
    """Raise ApiError: models are not published from here."""
    raise ApiError("/api/push is not supported: edgedec publishes no models", status=501, code="not_supported")


async def _answer(request: Request, service: Service, kind: Kind) -> Response:
    fields: Fields = await read_fields(request, service.settings)
    named = await service.find(str(fields.required("model")))
    options, n_ctx = requests.read_options(fields.object("options"))
    wanted = WantedModel(named, n_ctx, asked_seconds(fields.take("keep_alive")))
    if wanted.keep_s == 0 and not any(fields.has(name) for name in _TEXTS[kind]):
        await service.shelf.unload(lambda place: place.recipe == named.recipe)
        return JSONResponse(empty_answer(kind, named.name, "unload"))

    def read(lease: Lease) -> tuple[TextRequest | None, Dialect]:
        engine = lease.loaded.engine
        if kind == "chat":
            texts, delivery = requests.read_chat(fields, options, engine)
        else:
            texts, delivery = requests.read_generate(fields, options, engine)
        splitter = Splitter() if texts is None else texts.splitter(engine)
        return texts, OllamaForm(kind, named.name, delivery, engine.tokenizer, splitter, lease.load_s)

    return cast(Response, Reply(service, wanted, fields, read))
