"""llama-server's /lora-adapters: the adapters of a model, and the scales that they have in requests that name none."""

from typing import Any

from starlette.requests import Request

from edgedec_apps.server.core.answer import Answer, Job
from edgedec_apps.server.core.bodies import parse_object, read_body
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.llama.fields import adapter_documents, read_lora

_SCALES = "the body"


async def adapters(request: Request, service: Service) -> Answer:
    """Answer with the adapters of the model that the query names, else of the server's first one."""
    named = await service.find(request.query_params.get("model"))

    async def compute(job: Job) -> list[dict[str, Any]]:
        return adapter_documents(job.engine)

    return Answer(service, named, Fields({}), compute)


async def set_scales(request: Request, service: Service) -> Answer:
    """Set the scales of the requests that name none, and answer with the adapters; the body is a list."""
    body = await read_body(request, service.settings)
    fields = Fields(parse_object(b'{"%b": %b}' % (_SCALES.encode(), bytes(body))))
    named = await service.find(request.query_params.get("model"))

    async def compute(job: Job) -> list[dict[str, Any]]:
        engine = job.engine
        scales = read_lora(fields, engine, _SCALES)
        if fields.rest():
            raise fields.refusal(_SCALES, "must be one list")
        engine.lora = scales or engine.lora
        return adapter_documents(engine)

    return Answer(service, named, fields, compute)
