"""OpenAI's interface: /v1/models, /v1/chat/completions and /v1/completions."""

import asyncio
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.refining import read_refine, with_refine
from edgedec_apps.server.core.reply import Dialect, written
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.ollama.forms import timestamp
from edgedec_apps.server.ollama.models import capabilities
from edgedec_apps.server.openai.forms import ChatForm, CompletionForm
from edgedec_apps.server.openai.requests import read_chat, read_completion
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

    def read(job: Job) -> tuple[TextRequest, Dialect]:
        engine = job.engine
        how = read_refine(fields, service.settings.checks)
        texts, delivery = read_chat(fields, engine)
        texts = with_refine(fields, texts, how, streams=delivery.stream)
        return texts, ChatForm(named.name, delivery, engine.tokenizer, texts.n, splitter=texts.splitter(engine))

    return written(service, named, fields, read)


async def completions(request: Request, service: Service) -> Answer:
    """Continue texts."""
    fields, named = await read_named(request, service)

    def read(job: Job) -> tuple[TextRequest, Dialect]:
        tokenizer = job.engine.tokenizer
        texts, delivery = read_completion(fields, job.engine)
        echoed = [
            prompt if isinstance(prompt, str) else tokenizer.decode(cast(tuple[int, ...], prompt))
            for prompt in (texts.prompts if delivery.echo else ())
        ]
        return texts, CompletionForm(named.name, delivery, tokenizer, texts.n, prompts=echoed)

    return written(service, named, fields, read)


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
        "chat": engine.can_chat,
        "tools": engine.can_chat and "tools" in engine.template.source,
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
