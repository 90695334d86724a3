"""OpenAI's /v1/responses: answers, and those that are kept."""

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgedec_apps.server.core.answer import Answer, Job, read_named
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.reply import Dialect, written
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.openai.responses_forms import ResponseForm
from edgedec_apps.server.openai.responses_requests import read_response


async def create(request: Request, service: Service) -> Answer:
    """Answer a conversation."""
    fields, named = await read_named(request, service)

    def read(job: Job) -> tuple[TextRequest, Dialect]:
        engine = job.engine
        texts, asked = read_response(fields, engine, service.responses)
        form = ResponseForm(named.name, asked, engine.tokenizer, texts.splitter(engine), service.responses.put)
        return texts, form

    return written(service, named, fields, read)


async def retrieve(request: Request, service: Service) -> Response:
    """Send a response that is kept."""
    response_id = request.path_params["id"]
    kept = service.responses.get(response_id)
    if kept is None:
        raise _not_kept(response_id)
    return JSONResponse(kept.document)


async def delete(request: Request, service: Service) -> Response:
    """Forget a response."""
    response_id = request.path_params["id"]
    if not service.responses.drop(response_id):
        raise _not_kept(response_id)
    return JSONResponse({"id": response_id, "object": "response", "deleted": True})


def _not_kept(response_id: str) -> ApiError:
    what = f"there is no response {response_id!r:.100} here; the latest ones are kept in memory, unless store is false"
    return ApiError(what, status=404, code="not_found", param="id")
