"""OpenAI's interface: /v1/models, /v1/chat/completions and /v1/completions."""

from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgedec.layer_skip.skipping_model import lossy_note
from edgedec_apps.server.bodies import read_fields
from edgedec_apps.server.errors import ApiError
from edgedec_apps.server.openai_forms import ChatForm, CompletionForm
from edgedec_apps.server.reply import Reply
from edgedec_apps.server.requests import read_chat, read_completion
from edgedec_apps.server.service import Service
from edgedec_apps.server.web import endpoint


def routes() -> list[BaseRoute]:
    """Return the routes below /v1."""
    return [
        Route("/v1/models", endpoint(models)),
        Route("/v1/models/{name:path}", endpoint(model)),
        Route("/v1/chat/completions", endpoint(chat_completions), methods=["POST"]),
        Route("/v1/completions", endpoint(completions), methods=["POST"]),
        Route("/v1/embeddings", endpoint(embeddings), methods=["POST"]),
    ]


async def models(request: Request, service: Service) -> Response:
    """List the one model that is served."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


async def model(request: Request, service: Service) -> Response:
    """Describe the model of a name (ApiError 404 where the server has another model)."""
    service.require_name(request.path_params["name"])
    return JSONResponse(_card(service))


async def chat_completions(request: Request, service: Service) -> Response:
    """Answer a chat."""
    fields = await read_fields(request, service.settings)
    loaded = service.ready()
    engine = loaded.engine
    name = service.require_name(fields.text("model") or service.name)
    texts, delivery = read_chat(fields, engine, loaded.file.template)
    service.slots.require_room()
    form = ChatForm(name, delivery, engine.tokenizer, texts.n, texts.tool_names)
    return cast(Response, Reply(service, engine, texts, form))


async def completions(request: Request, service: Service) -> Response:
    """Continue texts."""
    fields = await read_fields(request, service.settings)
    engine = service.ready().engine
    name = service.require_name(fields.text("model") or service.name)
    texts, delivery = read_completion(fields, engine)
    service.slots.require_room()
    echoed = [
        prompt if isinstance(prompt, str) else engine.tokenizer.decode(cast(tuple[int, ...], prompt))
        for prompt in (texts.prompts if delivery.echo else ())
    ]
    form = CompletionForm(name, delivery, engine.tokenizer, texts.n, echoed)
    return cast(Response, Reply(service, engine, texts, form))


async def embeddings(request: Request, service: Service) -> Response:
    """Raise ApiError: there are no embeddings."""
    raise no_embeddings()


def no_embeddings() -> ApiError:
    """Return the answer to requests for embeddings."""
    return ApiError(
        "embeddings are not supported: the runtimes give logits, and no model of the catalogue was trained to embed",
        status=501,
        code="not_supported",
    )


def _card(service: Service) -> dict[str, Any]:
    card: dict[str, Any] = {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "edgedec",
        "ready": service.loaded is not None,
    }
    if service.loaded is not None:
        engine = service.loaded.engine
        facts = engine.card
        card["meta"] = {
            "n_ctx": engine.n_ctx,
            "n_ctx_train": facts.n_ctx_train,
            "n_vocab": facts.n_vocab,
            "n_embd": facts.n_embd,
            "architecture": facts.architecture,
            "runtime": facts.runtime,
            "chat": engine.can_chat,
        }
        if note := lossy_note(facts):
            card["meta"]["lossy"] = note
    return card
