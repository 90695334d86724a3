"""OpenAI's interface: /v1/models, /v1/chat/completions and /v1/completions."""

import asyncio
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.lent import read_wanted
from edgedec_apps.server.core.refining import read_refine, with_refine
from edgedec_apps.server.core.reply import Dialect, Reply
from edgedec_apps.server.core.service import Service, endpoint
from edgedec_apps.server.ollama.forms import timestamp
from edgedec_apps.server.ollama.models import capabilities
from edgedec_apps.server.openai.forms import ChatForm, CompletionForm
from edgedec_apps.server.openai.requests import read_chat, read_completion
from edgedec_apps.server.shelf.model_files import with_files
from edgedec_apps.server.shelf.models import ModelFile
from edgedec_apps.server.shelf.names import Named
from edgedec_apps.server.shelf.shelf import Lease


def routes() -> list[BaseRoute]:
    """Return the routes below /v1."""
    return [
        Route("/v1/models", endpoint(models)),
        Route("/v1/models/{name:path}", endpoint(model)),
        Route("/v1/chat/completions", endpoint(chat_completions), methods=["POST"]),
        Route("/v1/completions", endpoint(completions), methods=["POST"]),
    ]


async def models(request: Request, service: Service) -> Response:
    """List the models, those of the command line first."""
    found = await asyncio.to_thread(lambda: with_files(service.names.all()))
    cards = [_card(service, named, file) for named, file in found]
    ends = {"first_id": cards[0]["id"] if cards else None, "last_id": cards[-1]["id"] if cards else None}
    return JSONResponse({"object": "list", "data": cards, "has_more": False} | ends)


async def model(request: Request, service: Service) -> Response:
    """Describe the model of a name (ApiError 404 where there is none)."""
    name = request.path_params["name"]
    ((named, file),) = await asyncio.to_thread(lambda: with_files([service.names.find(name)]))
    return JSONResponse(_card(service, named, file))


async def chat_completions(request: Request, service: Service) -> Response:
    """Answer a chat."""
    fields, wanted = await read_wanted(request, service)

    def read(lease: Lease) -> tuple[TextRequest, Dialect]:
        engine = lease.loaded.engine
        how = read_refine(fields, service.settings.checks)
        texts, delivery = read_chat(fields, engine)
        texts = with_refine(fields, texts, how, streams=delivery.stream)
        return texts, ChatForm(wanted.named.name, delivery, engine.tokenizer, texts.n, texts.splitter(engine))

    return cast(Response, Reply(service, wanted, fields, read))


async def completions(request: Request, service: Service) -> Response:
    """Continue texts."""
    fields, wanted = await read_wanted(request, service)

    def read(lease: Lease) -> tuple[TextRequest, Dialect]:
        tokenizer = lease.loaded.engine.tokenizer
        texts, delivery = read_completion(fields, lease.loaded.engine)
        echoed = [
            prompt if isinstance(prompt, str) else tokenizer.decode(cast(tuple[int, ...], prompt))
            for prompt in (texts.prompts if delivery.echo else ())
        ]
        return texts, CompletionForm(wanted.named.name, delivery, tokenizer, texts.n, echoed)

    return cast(Response, Reply(service, wanted, fields, read))


def _card(service: Service, named: Named, file: ModelFile | None) -> dict[str, Any]:
    loaded = service.shelf.place(named.recipe).loaded
    card: dict[str, Any] = {
        "id": named.name,
        "object": "model",
        "created": service.created,
        "owned_by": "edgedec",
        "ready": loaded is not None,
    }
    if service.settings.checks:
        card["checks"] = list(service.settings.checks)  # what `refine` may name
    card |= {"type": "model", "display_name": named.name, "created_at": timestamp(service.created)}  # Anthropic's
    file = file if loaded is None else loaded.file
    if file is not None:
        card["capabilities"] = capabilities(file, loaded)
    if loaded is None:
        return card | {"meta": _meta_of_file(file)}
    engine = loaded.engine
    facts = engine.card
    card["meta"] = {
        "n_ctx": engine.n_ctx,
        "n_ctx_train": facts.n_ctx_train,
        "n_vocab": facts.n_vocab,
        "n_embd": facts.n_embd,
        "architecture": facts.architecture,
        "runtime": facts.runtime,
        "chat": engine.template is not None,
        "tools": engine.template is not None and "tools" in engine.template.source,
    }
    if facts.lossy:
        card["meta"]["lossy"] = facts.lossy
    return card


def _meta_of_file(file: ModelFile | None) -> dict[str, Any]:
    """Return what the file of a model that is not loaded says; empty where it says nothing."""
    if file is None or file.info is None:
        return {}
    info = file.info
    facts = {"n_ctx_train": info.n_ctx_train, "n_vocab": info.n_vocab, "n_embd": info.n_embd}
    return facts | {
        "architecture": info.architecture,
        "chat": file.template is not None,
        "tools": "tools" in (file.template or ""),
    }
