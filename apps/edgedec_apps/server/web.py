"""What the endpoints share: the service behind a request, and errors in the form that its address speaks."""

from collections.abc import Awaitable, Callable
from logging import getLogger

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from edgedec.errors import EdgedecError
from edgedec_apps.server.errors import Problem, problem_of
from edgedec_apps.server.service import Service

Handler = Callable[[Request, Service], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

_LOG = getLogger("edgedec.server")


def endpoint(handler: Handler) -> Endpoint:
    """Return what a route wants: the service is found, and an error becomes an answer."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, request.app.state.service)
        except ClientDisconnect:  # in the middle of its own request: nobody reads the answer
            return Response(status_code=400)
        except EdgedecError as error:
            return refusal(request.url.path, problem_of(error))
        except Exception as error:
            _LOG.exception("%s failed", request.url.path)
            return refusal(request.url.path, problem_of(error))

    return answer


def refusal(path: str, problem: Problem) -> Response:
    """Return an error as an answer."""
    return JSONResponse(problem.document(path), problem.status, problem.headers)
