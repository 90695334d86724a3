"""Asks a running server: what `edgedec ps`, `edgedec stop` and `edgedec launch` share."""

import json
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from edgedec.errors import EdgedecError, ModelNotFoundError, RequestError
from edgedec_apps.cli.declared import flag

_PANEL = "Server"
_CONNECT_S = 5.0

DEFAULT_URL = "http://127.0.0.1:8080"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: its URL, or its port on this machine; its key; the certificate that signed its own."""

    url: str = flag("--server URL", "The address of the server.", DEFAULT_URL, panel=_PANEL)
    port: int | None = flag("--port N", "Its port, on this machine.", panel=_PANEL, least=1, most=65535)
    api_key: str | None = flag("--api-key KEY", "The key of the server, if it has one.", panel=_PANEL)
    ca: Path | None = flag(
        "--tls-ca FILE",
        "File of the certificate (PEM) that signed the server's, for https (default: the system's).",
        panel=_PANEL,
    )


def url_of(server: Address) -> str:
    """Return the URL of a server (RequestError where options contradict each other)."""
    if server.port is not None and server.url != DEFAULT_URL:
        raise RequestError("--port and --server are given; write the port behind the address, as in --server HOST:PORT")
    url = server.url.rstrip("/")
    if server.port is not None:
        url = f"{'http' if server.ca is None else 'https'}://127.0.0.1:{server.port}"
    address = url if "://" in url else f"http://{url}"
    if server.ca is not None and not address.startswith("https://"):
        raise RequestError(f"--tls-ca is for a server at https://, and this one is at {address}")
    return address


def listens(server: Address) -> bool:
    """Return whether anything listens where a server is (RequestError as url_of)."""
    parts = urlsplit(url_of(server))
    with suppress(OSError, ValueError):  # the latter for a port that is no number
        address = (parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80))
        socket.create_connection(address, _CONNECT_S).close()
        return True
    return False


def ask(method: str, server: Address, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the JSON object that a server answers with; waits for it as long as the server takes.

    Args:
        method: The HTTP method.
        server: Where the server is.
        path: The path below it.
        body: The object to send, or None.

    Raises:
        RequestError: No server answers there, its certificate is not trusted, or what answers is no edgedec.
        StorageError: The file of the certificate can't be read.
        ModelNotFoundError: The server has no such model.
        PullError: What answers sends more than an edgedec server would.
        EdgedecError: The server refused; the message is its own.
    """
    import httpx

    from edgedec_apps.tls import client_context
    from edgedec_models.fetching.documents import MOST_JSON_BYTES, read_content

    headers = {} if server.api_key is None else {"authorization": f"Bearer {server.api_key}"}
    address = url_of(server)
    try:
        with httpx.stream(
            method,
            f"{address}{path}",
            json=body,
            headers=headers | {"accept-encoding": "identity"},
            timeout=httpx.Timeout(None, connect=_CONNECT_S),
            trust_env=False,
            verify=client_context(server.ca) if address.startswith("https://") else True,
        ) as reply:
            content = read_content(reply, MOST_JSON_BYTES, f"ask {address}")
    except (httpx.TransportError, httpx.InvalidURL) as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise RequestError(
                f"the certificate of {address} is not trusted ({error}); give --tls-ca FILE, the certificate that "
                "signed it"
            ) from error
        raise RequestError(
            f"no server answers at {address} ({error}); start one with edgedec serve, or give its --port or --server"
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
