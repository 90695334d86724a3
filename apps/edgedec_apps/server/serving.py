"""Runs a server, from its socket to its end: a thread loads the model meanwhile, and a cancel ends both."""

import asyncio
import os
import socket
import threading
from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import cast

import uvicorn

from edgedec.errors import CancelledError, EdgedecError, RequestError
from edgedec.progress import CancelToken
from edgedec_apps.server.app import build_app
from edgedec_apps.server.connections import Connection
from edgedec_apps.server.service import Loaded, Service
from edgedec_apps.server.settings import Settings

_GRACE_S = 5
_BACKLOG = 128
_IDLE_S = 15
_POLL_S = 0.05
Load = Callable[[CancelToken], Loaded]


def open_socket(settings: Settings) -> socket.socket:
    """Return a socket bound to the host and port, before anything is loaded.

    Raises:
        RequestError: The port is in use, or the host is not an address of this machine.
    """
    host = settings.host.strip("[]")
    try:
        found = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = min(found, key=lambda each: each[0] != socket.AF_INET)
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise _unusable(settings, error) from error
    try:
        if os.name == "posix":  # on other systems it would let two servers share a port
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise _unusable(settings, error) from error
    return listener


def _unusable(settings: Settings, error: OSError) -> RequestError:
    reason = error.strerror or str(error)
    return RequestError(
        f"can't listen on {settings.host} port {settings.port}: {reason}; give another --port (0 for any)"
    )


def address_of(listener: socket.socket) -> str:
    """Return the URL of a listening socket, for a browser."""
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def serve(
    settings: Settings,
    listener: socket.socket,
    load: Load,
    cancel: CancelToken,
    on_ready: Callable[[Service], None],
) -> None:
    """Serve until `cancel`; then cancel the requests that run, and close the sockets and the model.

    Args:
        settings: The settings of the server.
        listener: The socket of open_socket; it is closed at the end.
        load: Loads the model; called in a thread, while the server answers 503.
        cancel: Ends the server; may be cancelled from any thread.
        on_ready: Called in the thread of `load` once the model is loaded.

    Raises:
        EdgedecError: The model could not be loaded.
    """
    service = Service(settings)
    loader = threading.Thread(target=_load, args=(service, load, cancel, on_ready), name="edgedec-load", daemon=True)
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
        )
    )
    loader.start()
    try:
        asyncio.run(_run(server, service, listener, cancel))
    finally:
        cancel.cancel()
        listener.close()
        loader.join()
        if service.loaded is not None:
            service.loaded.close()
    if service.failure is not None and not isinstance(service.failure, CancelledError):
        raise service.failure


async def _run(server: uvicorn.Server, service: Service, listener: socket.socket, cancel: CancelToken) -> None:
    """Run uvicorn until the cancel, or until loading the model fails."""
    running = asyncio.create_task(server.serve(sockets=[listener]))
    while not cancel.cancelled and service.failure is None and not running.done():
        await asyncio.wait({running}, timeout=_POLL_S)
    service.stop()
    server.should_exit = True
    await running


def _load(service: Service, load: Load, cancel: CancelToken, on_ready: Callable[[Service], None]) -> None:
    begun = perf_counter()
    try:
        loaded = load(cancel)
    except EdgedecError as error:
        service.failure = error
        return
    except Exception as error:  # becomes the error of the command
        service.failure = EdgedecError(f"the model could not be loaded: {type(error).__name__}: {error}")
        return
    service.load_s = perf_counter() - begun
    if loaded.room_bytes is not None:
        service.room.n_bytes = loaded.room_bytes
    service.loaded = loaded
    if not cancel.cancelled:
        on_ready(service)
