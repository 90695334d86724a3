"""The web application: the routes of all interfaces, the state of the server, and the web chat."""

import mimetypes
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from edgedec_apps.server import search_api
from edgedec_apps.server.anthropic import api as anthropic
from edgedec_apps.server.core import metrics
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.service import Handler, Service, endpoint, refusal
from edgedec_apps.server.guard import Guard
from edgedec_apps.server.llama import api as llama
from edgedec_apps.server.ollama import api as ollama
from edgedec_apps.server.ollama import models as ollama_models
from edgedec_apps.server.openai import api as openai
from edgedec_apps.server.openai import responses
from edgedec_apps.server.page import api as page_api

STATIC = Path(__file__).parent / "page" / "static"

_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


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


_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/", page),
    ("GET", "/health", health),
    ("GET", "/metrics", metrics_text),
    ("GET", "/v1/models", openai.models),
    ("GET", "/v1/models/{name:path}", openai.model),
    ("POST", "/v1/chat/completions", openai.chat_completions),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/responses", responses.create),
    ("GET", "/v1/responses/{id}", responses.retrieve),
    ("DELETE", "/v1/responses/{id}", responses.delete),
    ("POST", "/v1/messages", anthropic.create),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/tokenize", llama.tokenize),
    ("POST", "/detokenize", llama.detokenize),
    ("GET", "/lora-adapters", llama.adapters),
    ("POST", "/lora-adapters", llama.set_scales),
    ("POST", "/infill", llama.infill),
    ("POST", "/v1/embeddings", search_api.embeddings),
    ("POST", "/api/embed", search_api.embed),
    ("POST", "/api/embeddings", search_api.embed_one),
    ("POST", "/extract", search_api.extract),
    ("POST", "/v1/rerank", search_api.rerank),
    ("POST", "/v1/reranking", search_api.rerank),
    ("POST", "/v2/rerank", search_api.rerank),
    ("POST", "/api/chat", ollama.chat),
    ("POST", "/api/generate", ollama.generate),
    ("POST", "/api/push", ollama.push),
    ("GET", "/api/version", ollama_models.version),
    ("GET", "/api/tags", ollama_models.tags),
    ("GET", "/api/ps", ollama_models.ps),
    ("POST", "/api/show", ollama_models.show),
    ("POST", "/api/pull", ollama_models.pull_model),
    ("POST", "/api/create", ollama_models.create),
    ("POST", "/api/copy", ollama_models.copy),
    ("DELETE", "/api/delete", ollama_models.delete),
    ("POST", "/page/pdf", page_api.pdf),
    ("POST", "/page/passages", page_api.passages),
    ("GET", "/page/tools", page_api.list_tools),
    ("POST", "/page/tools", page_api.call_tool),
    ("GET", "/page/models", page_api.offered),
)
"""The method, the address and the handler of each endpoint."""


def build_app(service: Service) -> Starlette:
    """Return the ASGI application of a service."""
    routes = [Route(path, endpoint(handler), methods=[method]) for method, path, handler in _ROUTES]
    routes += [twin for route in routes for twin in _without_version(route)]
    middleware = [Middleware(Guard, service=service, paths=[route.path for route in routes])]
    files = Mount("/static", StaticFiles(directory=STATIC))
    app = Starlette(routes=[*routes, files], middleware=middleware, exception_handlers={HTTPException: _no_such})
    app.state.service = service
    mimetypes.add_type("text/javascript", ".js")  # missing in the tables of some systems
    return app


def _without_version(route: Route) -> list[Route]:
    """Return a route of /v1 at the addresses of clients whose base URL lacks the /v1, or has it twice."""
    _, version, rest = route.path.partition("/v1/")
    return [Route(f"{base}/{rest}", route.endpoint, methods=route.methods) for base in ("", "/v1/v1") if version]


async def _no_such(request: Request, error: Exception) -> Response:
    """Answer a request for an unknown address, or with a method that the address does not support."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    what = "this address does not support the method" if status == 405 else "there is no such address"
    path = request.url.path
    message = f"{request.method} {path!r:.200}: {what}; docs/server.md lists the addresses"
    return refusal(path, ApiError(message, status=status))
