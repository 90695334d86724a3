"""The settings of a server: where it listens, who may use it, and its limits."""

import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgedec.errors import RequestError

if TYPE_CHECKING:  # an import that takes 2 MB, for servers with TLS alone
    import ssl

_MOST_PORT = 65535
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", re.IGNORECASE | re.ASCII)
ROOM_BYTES = 512_000_000
"""Memory for all requests together, by default."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a server.

    Attributes:
        models: The names of the models that are loaded at the start, as the command line has them; may be empty.
        host: Name or address to listen on.
        port: TCP port; 0 takes a free one.
        aliases: Further names of the first model in requests.
        api_key: The key that requests must have, or None.
        no_auth: Allow other machines to use the server without a key.
        hosts: Names that the Host header of a request may have on loopback, beside this machine's own.
        origins: Web origins other than the server's own whose pages may use the server ("https://example.org").
        n_parallel: Requests that run at once.
        n_queue: Requests that may wait; further ones are answered with 429.
        timeout_s: Most seconds of a request, including its wait.
        quiet_s: Most seconds for which a stream sends nothing.
        header_timeout_s: Most seconds until the header of a request is complete.
        body_timeout_s: Most seconds until the body of a request is complete.
        max_body_bytes: Most bytes of a request's body.
        n_connections: Most connections; a further one takes the place of one that waits for its client.
        n_per_address: Most connections of one address.
        room_bytes: Most memory for all requests together, from their bodies to their answers.
        offline: Never download a model.
        tls: The certificate and the key with which the server speaks TLS; None for plain HTTP.
        keep_s: Seconds for which a model that a request loaded stays loaded without requests; infinite for ever.
        checks: By its name, the command of a check that requests may name in `refine`.
        keeps_billing: Whether the line for bills in Claude Code's prompts stays, which is another one in each request.
        keeps_answers: Whether prompts and answers are kept in the cache, for `edgedec learn --head`.
        image_hosts: Hosts from which pictures may be fetched by https; from others, and by http, none are.
    """

    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    aliases: tuple[str, ...] = ()
    api_key: str | None = field(default=None, repr=False)
    no_auth: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    n_parallel: int = 1
    n_queue: int = 16
    timeout_s: float = 600.0
    quiet_s: float = 10.0
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    max_body_bytes: int = 8_000_000
    n_connections: int = 512
    n_per_address: int = 256
    room_bytes: int = ROOM_BYTES
    offline: bool = False
    keep_s: float = 300.0
    tls: "ssl.SSLContext | None" = None
    keeps_billing: bool = False
    keeps_answers: bool = False
    image_hosts: tuple[str, ...] = ()
    checks: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require("--port", self.port, 0 <= self.port <= _MOST_PORT, f"0 to {_MOST_PORT}")
        _require("--parallel", self.n_parallel, 1 <= self.n_parallel <= 256, "1 to 256")
        _require("--queue", self.n_queue, 0 <= self.n_queue <= 10_000, "0 to 10000")
        for option in ("timeout", "header_timeout", "body_timeout"):
            seconds = getattr(self, f"{option}_s")
            _require(f"--{option.replace('_', '-')}", seconds, 0 < seconds < float("inf"), "above 0, in seconds")
        _require("--connections", self.n_connections, 1 <= self.n_connections <= 65_536, "1 to 65536")
        _require("--per-address", self.n_per_address, 1 <= self.n_per_address <= 65_536, "1 to 65536")
        if self.aliases and not self.models:
            raise RequestError("--alias names the model of the command line, and there is none; give its name first")
        for origin in self.origins:
            plain = origin == origin.strip().rstrip("/") and origin.count("/") == 2 and "://" in origin
            _require("--cors", origin, plain, "an origin, such as https://example.org")
        for name in self.image_hosts:
            plain = bool(_HOST.fullmatch(name))
            _require("--image-hosts", name, plain, "names of hosts with commas between, such as example.org,img.test")
        for name in self.hosts:
            _require("--allow-host", name, bool(_HOST.fullmatch(name)), "a name without a port, such as example.org")
        key = "key" if self.api_key is None else self.api_key
        if not key or not key.isascii() or not key.isprintable():
            raise RequestError("--api-key must be printable ASCII, not empty; clients send it in a header")
        if not self.on_loopback and self.api_key is None and not self.no_auth:
            raise RequestError(
                f"--host {self.host} can be reached from other machines: protect it with --api-key KEY (or "
                "EDGEDEC_API_KEY), or give --no-auth if everybody there may use it"
            )

    @property
    def on_loopback(self) -> bool:
        """Whether only this machine can reach the server."""
        return is_loopback(self.host)


def is_loopback(host: str) -> bool:
    """Return whether a name or address is this machine's own, without asking a name server.

    >>> is_loopback("localhost"), is_loopback("127.0.0.2"), is_loopback("[::1]"), is_loopback("0.0.0.0")
    (True, True, True, False)
    """
    if host.lower().removesuffix(".") == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _require(name: str, value: object, holds: bool, expected: str) -> None:
    if not holds:
        raise RequestError(f"{name} is {value!r}; it must be {expected}")
