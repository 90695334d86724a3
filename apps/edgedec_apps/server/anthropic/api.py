"""Anthropic's interface: /v1/messages and /v1/messages/count_tokens."""

from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edgedec_apps.server.anthropic.forms import MessageForm
from edgedec_apps.server.anthropic.requests import read_message
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.lent import Computed, Lending, read_wanted
from edgedec_apps.server.core.prompts import read_prompts
from edgedec_apps.server.core.reply import Dialect, Reply
from edgedec_apps.server.core.service import Service, endpoint
from edgedec_apps.server.shelf.shelf import Lease


def routes() -> list[BaseRoute]:
    """Return the routes of /v1/messages."""
    return [
        Route("/v1/messages", endpoint(create), methods=["POST"]),
        Route("/v1/messages/count_tokens", endpoint(count_tokens), methods=["POST"]),
    ]


async def create(request: Request, service: Service) -> Response:
    """Answer a chat."""
    fields, wanted = await read_wanted(request, service)

    def read(lease: Lease) -> tuple[TextRequest, Dialect]:
        engine = lease.loaded.engine
        texts, streams = read_message(fields, engine)
        return texts, MessageForm(wanted.named.name, texts.splitter(engine), streams=streams)

    return cast(Response, Reply(service, wanted, fields, read))


async def count_tokens(request: Request, service: Service) -> Response:
    """Count the tokens of a chat's prompt."""
    fields, wanted = await read_wanted(request, service)

    async def compute(lending: Lending) -> dict[str, Any]:
        engine = lending.lease.loaded.engine
        texts, _ = read_message(fields, engine)
        with lending.queue.preparing():
            (prompt,) = await read_prompts(
                engine,
                wanted.named.completed(texts),
                lending.share,
                lending.cancel,
                service.settings.image_hosts,
            )
        return {"input_tokens": len(prompt.token_ids)}

    return cast(Response, Computed(service, wanted, fields, compute))
