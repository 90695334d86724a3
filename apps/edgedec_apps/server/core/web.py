"""What all endpoints share: they get the service, and errors are answered in the form of their interface."""

from collections.abc import Awaitable, Callable
from logging import getLogger

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from edgedec.errors import EdgedecError
from edgedec_apps.server.core.errors import Problem, problem_of
from edgedec_apps.server.core.service import Service

Handler = Callable[[Request, Service], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]

_LOG = getLogger("edgedec.server")


def endpoint(handler: Handler) -> Endpoint:
    """Return an endpoint for a route: it passes the service to the handler, and answers the handler's errors."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, request.app.state.service)
        except ClientDisconnect:  # the client disconnected before its request was complete, and reads no answer
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
