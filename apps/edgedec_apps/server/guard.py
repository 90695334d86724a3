"""The first check of every request: may this client use the server? It also counts the request.

- On loopback the Host header must name this machine, or be a name of --allow-host; this refuses a web page whose domain
  name was changed to point here (DNS rebinding).
- A web page of another origin is refused (Origin, Sec-Fetch-Site) unless --cors names the origin; else any page that
  the user visits could generate texts here, even if it can't read them. A page that is named may send any header, and
  reads every answer and every error.
- A key, where the server has one, is required except for /health and the files of the web chat.
"""

import hmac
import re
from collections.abc import Collection, Iterable
from logging import getLogger
from time import perf_counter

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edgedec_apps.server.core.budget import MEMORY, RequestMemory
from edgedec_apps.server.core.errors import ApiError, problem_of
from edgedec_apps.server.core.service import Service, refusal
from edgedec_apps.server.core.settings import is_loopback

_OPEN = ("/", "/health", "/favicon.ico")
_OPEN_BELOW = "/static/"
_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
_ALLOWED = {
    "access-control-allow-methods": "DELETE, GET, HEAD, POST",
    "access-control-allow-private-network": "true",
    "access-control-max-age": "600",
}
# RFC 9110, section 7.2; a name has no character that a domain name can't have.
_HOST = re.compile(r"(?:(?P<name>[A-Za-z0-9.-]+)|\[(?P<address>[0-9A-Fa-f:.]*:[0-9A-Fa-f:.]*)\])(?::[0-9]{1,5})?")
_LOG = getLogger("edgedec.server")


class Guard:
    """ASGI middleware around the whole application.

    Args:
        service: The service with the settings and the counters.
        paths: Addresses that are counted one by one; all others are counted together.
    """

    def __init__(self, app: ASGIApp, service: Service, paths: Iterable[str]) -> None:
        self._app = app
        self._service = service
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path, begun = scope["path"], perf_counter()
        status = 0
        asked = Headers(scope=scope)
        cors = self._cors(asked.get("origin"))
        memory = scope[MEMORY] = RequestMemory(self._service.memory, self._service.settings.body_timeout_s)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in (_HEADERS | cors).items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            try:
                self._check(path, scope["method"], asked)
                asks = cors and scope["method"] == "OPTIONS" and "access-control-request-method" in asked
                await (_preflight(asked) if asks else self._app)(scope, receive, sending)
            except Exception as error:
                if status:
                    raise
                if not isinstance(error, ApiError):
                    _LOG.exception("%s failed", path)
                await refusal(path, problem_of(error))(scope, receive, sending)
        finally:
            memory.close()
            self._service.metrics.count_request(path if path in self._paths else "other", status)
            _LOG.info("%s %s %d %.0f ms", scope["method"], path, status, 1000 * (perf_counter() - begun))

    def _cors(self, origin: str | None) -> dict[str, str]:
        """Return the headers that let a page of this origin read the answer; none where --cors does not name it."""
        if origin not in self._service.settings.origins:
            return {}
        return {"access-control-allow-origin": str(origin), "access-control-expose-headers": "*", "vary": "Origin"}

    def _check(self, path: str, method: str, headers: Headers) -> None:
        settings = self._service.settings
        host = headers.get("host", "")
        if settings.on_loopback and not _names_this_machine(host, settings.hosts):
            raise ApiError(
                f"the Host header is {host!r:.100}; on loopback it must name this machine, or be a name that "
                "--allow-host allows, such as that of a proxy before this server",
                status=403,
            )
        origin = headers.get("origin")
        origins = (f"http://{host}", f"https://{host}")  # https where a proxy has the certificate
        if origin is not None and origin not in settings.origins and origin.lower() not in map(str.lower, origins):
            raise ApiError(f"pages of {origin!r:.100} may not use this server (--cors allows them)", status=403)
        if origin is None and headers.get("sec-fetch-site") in ("cross-site", "same-site") and path not in _OPEN:
            raise ApiError("pages of other sites may not use this server", status=403)
        if settings.api_key is None or method == "OPTIONS" or path in _OPEN or path.startswith(_OPEN_BELOW):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        sent_key = key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")  # Anthropic's clients
        if not hmac.compare_digest(sent_key.encode(), settings.api_key.encode()):
            what = "is wrong" if sent_key else "is missing"
            raise ApiError(f"the API key {what}: send Authorization: Bearer KEY", status=401, code="invalid_api_key")


def _preflight(headers: Headers) -> Response:
    """Return the answer to a browser that asks what a page may send: all methods of ours, and any headers."""
    requested = headers.get("access-control-request-headers", "")
    return Response(status_code=204, headers=_ALLOWED | {"access-control-allow-headers": requested})


def _names_this_machine(host: str, hosts: Collection[str] = ()) -> bool:
    """Return whether a Host header names loopback or one of `hosts`, with any port.

    A header that is not just a name or an address and a port, such as one with an @ or a slash, names no machine.

    >>> _names_this_machine("localhost:8080"), _names_this_machine("[::1]"), _names_this_machine("evil.example:8080")
    (True, True, False)
    >>> _names_this_machine("evil.example@localhost"), _names_this_machine("[localhost]")
    (False, False)
    """
    match = _HOST.fullmatch(host)
    name = "" if match is None else match["name"] or match["address"]
    return is_loopback(name) or name.lower().removesuffix(".") in hosts
