"""OpenAI's /v1/responses: answers, and those that are kept."""

from typing import cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.generation import TextRequest
from edgedec_apps.server.core.lent import read_wanted
from edgedec_apps.server.core.reply import Dialect, Reply
from edgedec_apps.server.core.service import Service, endpoint
from edgedec_apps.server.openai.responses_forms import ResponseForm
from edgedec_apps.server.openai.responses_requests import read_response
from edgedec_apps.server.shelf.shelf import Lease


def routes() -> list[BaseRoute]:
    """Return the routes below /v1/responses."""
    return [
        Route("/v1/responses", endpoint(create), methods=["POST"]),
        Route("/v1/responses/{id}", endpoint(retrieve), methods=["GET"]),
        Route("/v1/responses/{id}", endpoint(delete), methods=["DELETE"]),
    ]


async def create(request: Request, service: Service) -> Response:
    """Answer a conversation."""
    fields, wanted = await read_wanted(request, service)

    def read(lease: Lease) -> tuple[TextRequest, Dialect]:
        engine = lease.loaded.engine
        texts, asked = read_response(fields, engine, service.responses)
        form = ResponseForm(wanted.named.name, asked, engine.tokenizer, texts.splitter(engine), service.responses.put)
        return texts, form

    return cast(Response, Reply(service, wanted, fields, read))


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
