"""Asks a running server: what `edgedec ps` and `edgedec stop` share."""

import json
from typing import Annotated, Any

from edgedec.errors import EdgedecError, ModelNotFoundError, RequestError
from edgedec_apps.cli.options import option

_PANEL = "Server"
_CONNECT_S = 5.0

ServerUrl = Annotated[str, option("--server", help="The address of the server.", metavar="URL", panel=_PANEL)]
ServerKey = Annotated[
    str | None, option("--api-key", help="The key of the server, if it has one.", metavar="KEY", panel=_PANEL)
]
DEFAULT_URL = "http://127.0.0.1:8080"


def ask(method: str, url: str, path: str, api_key: str | None, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object that a server answers with; waits for it as long as the server takes.

    Args:
        method: The HTTP method.
        url: The address of the server, such as DEFAULT_URL.
        path: The path below it.
        api_key: The server's key, or None.
        body: The object to send, or None.

    Raises:
        RequestError: No server answers there, or what answers is no edgedec.
        ModelNotFoundError: The server has no such model.
        PullError: What answers sends more than an edgedec server would.
        EdgedecError: The server refused; the message is its own.
    """
    import httpx

    from edgedec_models.fetching.documents import MOST_JSON_BYTES, read_content

    headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
    address = url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}"
    try:
        with httpx.stream(
            method,
            f"{address}{path}",
            json=body,
            headers=headers | {"accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
        ) as reply:
            content = read_content(reply, MOST_JSON_BYTES, f"ask {address}")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise RequestError(
            f"no server answers at {address} ({error}); start one with edgedec serve, or give its address with --server"
        ) from error
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise RequestError(f"what answers at {address} is no edgedec server (HTTP {reply.status_code})")
    if reply.is_success:
        return document
    message = document.get("error")
    text = message if isinstance(message, str) else f"the server answered with HTTP {reply.status_code}"
    raise (ModelNotFoundError if reply.status_code == 404 else EdgedecError)(text)
