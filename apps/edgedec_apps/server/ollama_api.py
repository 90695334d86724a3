"""ollama's interface: /api/chat and /api/generate; and the addresses that a server of one model does not support."""

from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgedec_apps.server import ollama_models, ollama_requests
from edgedec_apps.server.bodies import read_fields
from edgedec_apps.server.errors import ApiError
from edgedec_apps.server.fields import Fields
from edgedec_apps.server.ollama_forms import Kind, OllamaForm
from edgedec_apps.server.openai_api import no_embeddings
from edgedec_apps.server.reply import Reply
from edgedec_apps.server.service import Service
from edgedec_apps.server.web import endpoint

_NOT_HERE = {"/api/create": "POST", "/api/copy": "POST", "/api/push": "POST", "/api/delete": "DELETE"}


def routes() -> list[BaseRoute]:
    """Return the routes below /api."""
    return [
        Route("/api/chat", endpoint(chat), methods=["POST"]),
        Route("/api/generate", endpoint(generate), methods=["POST"]),
        Route("/api/embed", endpoint(embed), methods=["POST"]),
        Route("/api/embeddings", endpoint(embed), methods=["POST"]),
        *(Route(path, endpoint(not_here), methods=[method]) for path, method in _NOT_HERE.items()),
        *ollama_models.routes(),
    ]


async def chat(request: Request, service: Service) -> Response:
    """Answer a chat."""
    return await _answer(request, service, "chat")


async def generate(request: Request, service: Service) -> Response:
    """Answer a prompt, or continue it."""
    return await _answer(request, service, "generate")


async def embed(request: Request, service: Service) -> Response:
    """Raise ApiError: there are no embeddings."""
    raise no_embeddings()


async def not_here(request: Request, service: Service) -> Response:
    """Raise ApiError: the server does not create or delete models."""
    raise ApiError(
        f"{request.url.path} is not supported: the server runs one model; edgedec list, rm and pull manage the others",
        status=501,
        code="not_supported",
    )


async def _answer(request: Request, service: Service, kind: Kind) -> Response:
    fields: Fields = await read_fields(request, service.settings)
    loaded = service.ready()
    engine = loaded.engine
    name = service.require_name(str(fields.required("model")))
    if kind == "chat":
        texts, delivery = ollama_requests.read_chat(fields, engine, loaded.file.template)
    else:
        texts, delivery = ollama_requests.read_generate(fields, engine)
    names = None if texts is None else texts.tool_names
    form = OllamaForm(kind, name, delivery, engine.tokenizer, names)
    if texts is None:
        return JSONResponse(form.loaded())
    service.slots.require_room()
    return cast(Response, Reply(service, engine, texts, form))
