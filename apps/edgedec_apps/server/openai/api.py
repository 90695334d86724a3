"""OpenAI's interface: /v1/models, /v1/chat/completions and /v1/completions."""

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.reply import written
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama.api import timestamp
from edgedec_apps.server.ollama.models import capabilities
from edgedec_apps.server.openai.forms import ChatForm, CompletionForm
from edgedec_apps.server.openai.requests import read_chat, read_completion, read_refine, with_refine
from edgedec_apps.server.registry.models import ModelFile
from edgedec_apps.server.registry.names import Named, with_files


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


async def chat_completions(request: Request, service: Service) -> Answer:
    """Answer a chat."""
    fields, named = await read_named(request, service)

    def read(job: Job) -> ChatForm:
        how = read_refine(fields, service.settings.checks)
        texts, delivery = read_chat(fields, job.engine)
        return ChatForm(job, with_refine(fields, texts, how, streams=delivery.stream), delivery)

    return written(service, named, fields, read)


async def completions(request: Request, service: Service) -> Answer:
    """Continue texts."""
    fields, named = await read_named(request, service)

    return written(service, named, fields, lambda job: CompletionForm(job, *read_completion(fields, job.engine)))


def _card(service: Service, named: Named, file: ModelFile | None) -> dict[str, Any]:
    loaded = service.registry.entry(named.recipe).loaded
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
    facts = loaded.engine.card if loaded is not None else None if file is None else file.info
    meta: dict[str, Any] = {}
    if file is not None and facts is not None:
        meta = {"n_ctx_train": facts.n_ctx_train, "n_vocab": facts.n_vocab, "n_embd": facts.n_embd}
        meta |= {"architecture": facts.architecture, "chat": file.template is not None}
        meta["tools"] = "tools" in (file.template or "")
    if loaded is not None:
        engine = loaded.engine
        tools = engine.can_chat and "tools" in engine.template.source
        meta |= {"n_ctx": engine.n_ctx, "runtime": engine.card.runtime, "chat": engine.can_chat, "tools": tools}
        meta |= {"lossy": engine.card.lossy} if engine.card.lossy else {}
    return card | {"meta": meta}
