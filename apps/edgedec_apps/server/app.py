"""The web application: the routes of all interfaces, the state of the server, and the web chat."""

import mimetypes
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from edgedec_apps.server import extract_api, rerank_api
from edgedec_apps.server.anthropic import api as anthropic_api
from edgedec_apps.server.core import metrics
from edgedec_apps.server.core.errors import Problem
from edgedec_apps.server.core.service import Service, endpoint, refusal
from edgedec_apps.server.guard import Guard
from edgedec_apps.server.llama import infill_api, lora_api, token_api
from edgedec_apps.server.ollama import api as ollama_api
from edgedec_apps.server.openai import api as openai_api
from edgedec_apps.server.openai import embeddings_api, responses_api
from edgedec_apps.server.page import offers, passages, tools, uploads

STATIC = Path(__file__).parent / "page" / "static"

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def build_app(service: Service) -> Starlette:
    """Return the ASGI application of a service."""
    routes: list[BaseRoute] = [
        Route("/", endpoint(page)),
        Route("/health", endpoint(health)),
        Route("/metrics", endpoint(metrics_text)),
        *openai_api.routes(),
        *responses_api.routes(),
        *anthropic_api.routes(),
        *token_api.routes(),
        *lora_api.routes(),
        *embeddings_api.routes(),
        *extract_api.routes(),
        *rerank_api.routes(),
        *infill_api.routes(),
        *ollama_api.routes(),
        *uploads.routes(),
        *passages.routes(),
        *tools.routes(),
        *offers.routes(),
        Mount("/static", StaticFiles(directory=STATIC)),
    ]
    routes += [twin for route in routes if isinstance(route, Route) for twin in _without_version(route)]
    paths = [route.path for route in routes if isinstance(route, Route)]
    middleware = [Middleware(Guard, service=service, paths=paths)]
    app = Starlette(routes=routes, middleware=middleware, exception_handlers={HTTPException: _no_such})
    app.state.service = service
    mimetypes.add_type("text/javascript", ".js")  # missing in the tables of some systems
    return app


def _without_version(route: Route) -> list[Route]:
    """Return a route of /v1 at the addresses of clients whose base URL lacks the /v1, or has it twice."""
    _, version, rest = route.path.partition("/v1/")
    return [Route(f"{base}/{rest}", route.endpoint, methods=route.methods) for base in ("", "/v1/v1") if version]


async def page(request: Request, service: Service) -> Response:
    """Send the page of the web chat."""
    html = (STATIC / "index.html").read_bytes()
    headers = {"content-security-policy": _PAGE_POLICY, "cache-control": "no-cache"}
    return Response(html, media_type="text/html", headers=headers)


async def health(request: Request, service: Service) -> Response:
    """Answer 200 where the server answers requests, else 503."""
    service.require_ready()
    served = service.names.served
    return JSONResponse({"status": "ok", "model": served[0].name if served else None})


async def metrics_text(request: Request, service: Service) -> Response:
    """Send the counters."""
    text = service.metrics.text(service.gauges())
    return PlainTextResponse(text, headers={"content-type": metrics.CONTENT_TYPE})


async def _no_such(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown address, or with a method that the address does not support."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = "this address does not support the method" if status == 405 else "there is no such address"
    path = request.url.path
    return refusal(path, Problem(status, f"{request.method} {path!r:.200}: {what}; docs/server.md lists the addresses"))
