"""What all endpoints share: the models, their names, the counters, the end of the server, and how errors are told."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from logging import getLogger
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from edgedec.api.engine import Engine
from edgedec.errors import EdgedecError
from edgedec.memory_plan import MemoryPlan
from edgedec.progress import CancelToken
from edgedec.runtime import processes_of
from edgedec_apps.server.core.errors import ApiError, Problem, closing_error, problem_of
from edgedec_apps.server.core.metrics import Gauge, Metrics, memory_gauges
from edgedec_apps.server.core.room import Room
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.openai.response_store import ResponseStore
from edgedec_apps.server.shelf.models import Prepare
from edgedec_apps.server.shelf.names import Named, Names
from edgedec_apps.server.shelf.shelf import Shelf

if TYPE_CHECKING:
    from edgedec_apps.tools.servers import ToolServers

_LOG = getLogger("edgedec.server")


@dataclass(slots=True)
class OfferedTools:
    """The tools of the web chat: their servers, which run without a question, and how many calls run."""

    servers: "ToolServers"
    patterns: tuple[str, ...] = ()
    n_running: int = 0


@dataclass(slots=True)
class Service:
    """The state of a server. Used by its event loop.

    Attributes:
        settings: The server's settings.
        prepare: Plans how a model is loaded.
        tools: The tools of the web chat; None where the operator gave none.
        starting: Whether the models of the command line are being loaded.
        failure: The error that loading them ended with, if any.
        closing: Whether the server is ending.
        names: What the names of models stand for.
        shelf: The models.
        room: Memory for requests.
        responses: The responses of /v1/responses that are kept.
        metrics: The counters.
        created: Time when the server started, in seconds since 1970.
        load_s: Seconds that loading the models of the command line took.
        n_connections: Number of open connections.
    """

    settings: Settings
    prepare: Prepare
    tools: OfferedTools | None = None
    starting: bool = True
    failure: EdgedecError | None = None
    closing: bool = False
    names: Names = field(init=False)
    shelf: Shelf = field(init=False)
    room: Room = field(init=False)
    responses: ResponseStore = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    load_s: float = 0.0
    n_connections: int = 0
    _running: set[CancelToken] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = self.settings
        self.names = Names(settings)
        self.shelf = Shelf(self.prepare, settings.n_parallel, settings.n_queue, self._adapt_room)
        self.room = Room(settings.room_bytes)
        self.responses = ResponseStore(self.room)

    def _adapt_room(self) -> None:
        """Give requests as much memory as every loaded model's plan keeps for them."""
        planned = [place.loaded.room_bytes for place in self.shelf.loaded if place.loaded is not None]
        self.room.n_bytes = min([self.settings.room_bytes, *(n_bytes for n_bytes in planned if n_bytes is not None)])

    async def find(self, name: str | None) -> Named:
        """Return the model of a name, as Names.find; without a model of the command line "default" is the one loaded.

        Raises:
            ApiError: No model has this name; or the server ends, or could not start.
            EdgedecError: A preset's file is damaged, or a folder can't be read.
        """
        self.require_open()
        loaded = self.shelf.loaded
        only = loaded[0].recipe if len(loaded) == 1 else None
        return await asyncio.to_thread(self.names.find, name, only)

    def require_open(self) -> None:
        """Raise ApiError 503 where the server ends, or could not start."""
        if self.failure is not None:
            raise self._failed(self.failure)
        if self.closing:
            raise closing_error()

    def require_ready(self) -> None:
        """Raise ApiError 503 while the server starts or ends, or where it could not start."""
        self.require_open()
        if self.starting:
            raise ApiError("the model is still loading", status=503, code="loading", retry_after_s=2)

    def fail(self, error: EdgedecError) -> None:
        """End the server, as a model of the command line can't be loaded; requests that wait are told why."""
        self.failure = error
        self.stop()

    def _failed(self, error: EdgedecError) -> ApiError:
        return ApiError(f"the model could not be loaded: {error}", status=503, code="model_failed")

    @contextmanager
    def running(self, cancel: CancelToken) -> Iterator[None]:
        """Let stop() cancel the work of the block."""
        self._running.add(cancel)
        try:
            yield
        finally:
            self._running.discard(cancel)

    def stop(self) -> None:
        """Refuse new requests and cancel those that run; called by the event loop's thread."""
        self.closing = True
        self.shelf.stop(closing_error() if self.failure is None else self._failed(self.failure))
        for cancel in list(self._running):
            cancel.cancel()

    def gauges(self) -> list[Gauge]:
        """Return the current values for the metrics."""
        places, plans = self.shelf.places, self._plans()
        ready = not (self.closing or self.starting or self.failure)
        return [
            Gauge("ready", "Whether the server answers requests.", float(ready)),
            Gauge("models_loaded", "Models that are loaded.", len(self.shelf.loaded)),
            Gauge("requests_running", "Requests that run.", sum(place.queue.n_running for place in places)),
            Gauge("requests_waiting", "Requests that wait.", sum(place.queue.n_waiting for place in places)),
            Gauge("parallel_limit", "Most requests of a model that may run at once.", self.settings.n_parallel),
            Gauge("queue_limit", "Most requests of a model that may wait.", self.settings.n_queue),
            Gauge("connections", "Open connections.", self.n_connections),
            Gauge("request_bytes", "Memory that requests hold.", self.room.n_taken),
            Gauge("request_bytes_limit", "Most memory that requests may hold.", self.room.n_bytes),
            Gauge("memory_cap_bytes", "Most memory that the process may hold.", _cap_bytes(plans)),
            Gauge("memory_planned_bytes", "Most memory that the process holds by its plan.", self._planned(plans)),
            Gauge("load_seconds", "Seconds that loading the first models took.", self.load_s or None),
            Gauge("start_time_seconds", "Time when the server started, in seconds since 1970.", self.created),
            *memory_gauges(processes_of(*self._engines())),
        ]

    def _engines(self) -> list[Engine]:
        return [place.loaded.engine for place in self.shelf.loaded if place.loaded is not None]

    def _plans(self) -> list[MemoryPlan]:
        return [engine.plan for engine in self._engines()]

    def _planned(self, plans: list[MemoryPlan]) -> int | None:
        """Return the bytes of all plans, what the models share counted once; None where nothing is planned."""
        places = self.shelf.loaded
        if not places or not all(plan.terms for plan in plans):
            return None
        return max(plan.total_bytes - place.n_bytes for plan, place in zip(plans, places, strict=True)) + sum(
            place.n_bytes for place in places
        )


def _cap_bytes(plans: list[MemoryPlan]) -> int | None:
    return plans[0].cap_bytes if plans else None


Handler = Callable[[Request, Service], Awaitable[Response]]
Endpoint = Callable[[Request], Awaitable[Response]]


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
            _LOG.exception("%r failed", request.url.path)
            return refusal(request.url.path, problem_of(error))

    return answer


def refusal(path: str, problem: Problem) -> Response:
    """Return an error as an answer."""
    return JSONResponse(problem.document(path), problem.status, problem.headers)
