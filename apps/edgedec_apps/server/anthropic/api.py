"""Anthropic's interface: /v1/messages and /v1/messages/count_tokens."""

from typing import Any

from starlette.requests import Request

from edgedec_apps.server.anthropic.forms import MessageForm
from edgedec_apps.server.anthropic.requests import read_message
from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.prompts import read_prompts
from edgedec_apps.server.core.reply import Dialect, written
from edgedec_apps.server.core.service import Service


async def create(request: Request, service: Service) -> Answer:
    """Answer a chat."""
    fields, named = await read_named(request, service)

    def read(job: Job) -> tuple[TextRequest, Dialect]:
        engine = job.engine
        texts, streams = read_message(fields, engine)
        return texts, MessageForm(named.name, texts.splitter(engine), streams=streams)

    return written(service, named, fields, read)


async def count_tokens(request: Request, service: Service) -> Answer:
    """Count the tokens of a chat's prompt."""
    fields, named = await read_named(request, service)

    async def compute(job: Job) -> dict[str, Any]:
        engine = job.engine
        texts, _ = read_message(fields, engine)
        with job.queue.preparing():
            hosts = service.settings.image_hosts
            (prompt,) = await read_prompts(engine, named.completed(texts), job.memory, job.cancel, hosts)
        return {"input_tokens": len(prompt.token_ids)}

    return Answer(service, named, fields, compute)
