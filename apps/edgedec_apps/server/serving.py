"""Runs a server, from its socket to its end: it loads the first models meanwhile, and a cancel ends both."""

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import cast

import uvicorn

from edgedec.errors import CancelledError, EdgedecError, RequestError
from edgedec.progress import CancelToken
from edgedec_apps.base_memory import keep_heap_small
from edgedec_apps.server.app import build_app
from edgedec_apps.server.connections import Connection
from edgedec_apps.server.core.service import OfferedTools, Service
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry.models import Prepare

_GRACE_S = 5
_BACKLOG = 128
_IDLE_S = 15
_POLL_S = 0.05


def open_socket(settings: Settings) -> socket.socket:
    """Return a socket bound to the host and port, before anything is loaded.

    Raises:
        RequestError: The port is in use, or the host is not an address of this machine.
    """
    host = settings.host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
        both = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        return socket.create_server(address, family=family, backlog=_BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        reason = (error.strerror or str(error)).partition(" (while ")[0]
        raise RequestError(
            f"can't listen on {settings.host} port {settings.port}: {reason}; give another --port (0 for any)"
        ) from error


def address_of(listener: socket.socket, *, tls: bool = False) -> str:
    """Return the URL of a listening socket, for a browser; with `tls` it is one of https."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"{'https' if tls else 'http'}://{shown}:{port}"


def serve(
    settings: Settings,
    listener: socket.socket,
    prepare: Prepare,
    cancel: CancelToken,
    on_ready: Callable[[Service], None],
    tools: OfferedTools | None = None,
) -> None:
    """Serve until `cancel`; then cancel the requests that run, and close the sockets and the models.

    Args:
        settings: The settings of the server.
        listener: The socket of open_socket; it is closed at the end.
        prepare: Plans how a model is loaded; called in threads.
        cancel: Ends the server; may be cancelled from any thread.
        on_ready: Called by the event loop's thread once the models of the settings are loaded, for which requests wait.
        tools: The tools of the web chat; None for none.

    Raises:
        EdgedecError: A model of the settings could not be loaded.
    """
    keep_heap_small()  # before threads begin
    service = Service(settings, prepare, tools)
    tls = settings.tls
    server = uvicorn.Server(
        uvicorn.Config(
            build_app(service),
            http=cast(type[asyncio.Protocol], partial(Connection, service)),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=_GRACE_S,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
    )
    try:
        asyncio.run(_run(server, service, listener, cancel, on_ready))
    finally:
        cancel.cancel()
        listener.close()
        service.registry.close()
    if service.failure is not None and not isinstance(service.failure, CancelledError):
        raise service.failure


async def _run(
    server: uvicorn.Server,
    service: Service,
    listener: socket.socket,
    cancel: CancelToken,
    on_ready: Callable[[Service], None],
) -> None:
    """Run uvicorn until the cancel, or until loading the first models fails."""
    if service.settings.tls is not None:  # uvicorn has no limit of its own for a client that says nothing
        loop = asyncio.get_running_loop()
        create = partial(loop.create_server, ssl_handshake_timeout=service.settings.header_timeout_s)
        loop.create_server = create  # type: ignore[method-assign]
    running = asyncio.create_task(server.serve(sockets=[listener]))
    beside = [asyncio.create_task(_start(service, on_ready)), asyncio.create_task(service.registry.expire())]
    while not cancel.cancelled and service.failure is None and not running.done():
        await asyncio.wait({running}, timeout=_POLL_S)
    service.stop()
    server.should_exit = True
    for task in beside:
        task.cancel()
    await asyncio.wait(beside)
    await running


async def _start(service: Service, on_ready: Callable[[Service], None]) -> None:
    """Load the models of the settings, as many as fit together; the others are loaded when they are asked for."""
    begun = perf_counter()
    try:
        for served in service.names.served:
            await service.registry.preload(served.recipe, n_ctx=served.n_ctx, keep_s=served.keep_s)
    except Exception as error:  # becomes the error of the command
        if service.closing:
            return
        what = f"the model could not be loaded: {type(error).__name__}: {error}"
        service.stop(error if isinstance(error, EdgedecError) else EdgedecError(what))
        return
    service.load_s = perf_counter() - begun
    service.starting = False
    on_ready(service)
