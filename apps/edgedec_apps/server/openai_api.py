"""OpenAI's interface: /v1/models, /v1/chat/completions, /v1/completions."""

from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgedec.layer_skip.skipping_model import lossy_note
from edgedec_apps.server.bodies import read_fields
from edgedec_apps.server.errors import ApiError
from edgedec_apps.server.openai_forms import ChatForm, CompletionForm, Frame
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
    """List the one model there is."""
    return JSONResponse({"object": "list", "data": [_card(service)]})


async def model(request: Request, service: Service) -> Response:
    """Describe a model (404 where it is not the one)."""
    service.require_name(request.path_params["name"])
    return JSONResponse(_card(service))


async def chat_completions(request: Request, service: Service) -> Response:
    """Answer a chat."""
    fields = await read_fields(request, service.settings)
    loaded = service.ready()
    engine = loaded.engine
    name = service.require_name(fields.text("model") or service.name)
    asked, wanted = read_chat(fields, engine, loaded.file.template)
    service.slots.require_room()
    form = ChatForm(Frame("chatcmpl", name, wanted, engine.tokenizer, asked.n), asked.tool_names)
    return cast(Response, Reply(service, engine, asked, form))


async def completions(request: Request, service: Service) -> Response:
    """Continue texts."""
    fields = await read_fields(request, service.settings)
    engine = service.ready().engine
    name = service.require_name(fields.text("model") or service.name)
    asked, wanted = read_completion(fields, engine)
    service.slots.require_room()
    echoed = [
        prompt if isinstance(prompt, str) else engine.tokenizer.decode(cast(tuple[int, ...], prompt))
        for prompt in (asked.prompts if wanted.echo else ())
    ]
    form = CompletionForm(Frame("cmpl", name, wanted, engine.tokenizer, asked.n), echoed)
    return cast(Response, Reply(service, engine, asked, form))


async def embeddings(request: Request, service: Service) -> Response:
    """Say why there are none."""
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
