"""llama-server's /lora-adapters: the adapters of a model, and the scales that they have in requests that name none."""

from typing import Any, cast

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from edgedec_apps.server.core.bodies import parse_object, read_body
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.lent import Computed, Lending, WantedModel
from edgedec_apps.server.core.service import Service, endpoint
from edgedec_apps.server.llama.fields import adapter_documents, read_lora

_SCALES = "the body"


def routes() -> list[BaseRoute]:
    """Return the routes of the address."""
    return [
        Route("/lora-adapters", endpoint(adapters), methods=["GET"]),
        Route("/lora-adapters", endpoint(set_scales), methods=["POST"]),
    ]


async def adapters(request: Request, service: Service) -> Response:
    """Answer with the adapters of the model that the query names, else of the server's first one."""
    named = await service.find(request.query_params.get("model"))

    async def compute(lending: Lending) -> list[dict[str, Any]]:
        return adapter_documents(lending.lease.loaded.engine)

    return cast(Response, Computed(service, WantedModel(named), Fields({}), compute))


async def set_scales(request: Request, service: Service) -> Response:
    """Set the scales of the requests that name none, and answer with the adapters; the body is a list."""
    body = await read_body(request, service.settings)
    fields = Fields(parse_object(b'{"%b": %b}' % (_SCALES.encode(), bytes(body))))
    named = await service.find(request.query_params.get("model"))

    async def compute(lending: Lending) -> list[dict[str, Any]]:
        engine = lending.lease.loaded.engine
        scales = read_lora(fields, engine, _SCALES)
        if fields.rest():
            raise fields.refusal(_SCALES, "must be one list")
        engine.lora = scales or engine.lora
        return adapter_documents(engine)

    return cast(Response, Computed(service, WantedModel(named), fields, compute))
