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
from starlette.types import ASGIApp

from edgedec.errors import EdgedecError
from edgedec.progress import CancelToken
from edgedec.runtime import processes_of
from edgedec_apps.server.core.budget import MemoryBudget
from edgedec_apps.server.core.errors import ApiError, closing_error, problem_of
from edgedec_apps.server.core.metrics import Gauge, Metrics, memory_gauges
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.openai.response_store import ResponseStore
from edgedec_apps.server.registry.models import Loaded, Prepare
from edgedec_apps.server.registry.names import Named, Names
from edgedec_apps.server.registry.registry import ModelRegistry

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
        registry: The models.
        memory: Memory for requests.
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
    registry: ModelRegistry = field(init=False)
    memory: MemoryBudget = field(init=False)
    responses: ResponseStore = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    load_s: float = 0.0
    n_connections: int = 0
    _running: set[CancelToken] = field(default_factory=set)

    def __post_init__(self) -> None:
        settings = self.settings
        self.names = Names(settings)
        self.registry = ModelRegistry(self.prepare, settings.n_parallel, settings.n_queue, self._adapt_memory)
        self.memory = MemoryBudget(settings.room_bytes)
        self.responses = ResponseStore(self.memory)

    def _adapt_memory(self) -> None:
        """Give requests as much memory as every loaded model's plan keeps for them."""
        planned = [loaded.request_bytes for loaded in self.registry.models if loaded.request_bytes is not None]
        self.memory.resize(min([self.settings.room_bytes, *planned]))

    async def find(self, name: str | None) -> Named:
        """Return the model of a name, as Names.find; without a model of the command line "default" is the one loaded.

        Raises:
            ApiError: No model has this name; or the server ends, or could not start.
            EdgedecError: A preset's file is damaged, or a folder can't be read.
        """
        self.require_open()
        loaded = self.registry.loaded
        only = loaded[0].recipe if len(loaded) == 1 else None
        return await asyncio.to_thread(self.names.find, name, only)

    def require_open(self) -> None:
        """Raise ApiError 503 where the server ends, or could not start."""
        if (error := self._ended()) is not None:
            raise error

    def require_ready(self) -> None:
        """Raise ApiError 503 while the server starts or ends, or where it could not start."""
        self.require_open()
        if self.starting:
            raise ApiError("the model is still loading", status=503, code="loading", retry_after_s=2)

    def _ended(self) -> ApiError | None:
        if self.failure is not None:
            return ApiError(f"the model could not be loaded: {self.failure}", status=503, code="model_failed")
        return closing_error() if self.closing else None

    @contextmanager
    def running(self, cancel: CancelToken) -> Iterator[None]:
        """Let stop() cancel the work of the block."""
        self._running.add(cancel)
        try:
            yield
        finally:
            self._running.discard(cancel)

    def stop(self, failure: EdgedecError | None = None) -> None:
        """Refuse new requests and cancel those that run; those that wait are told why, as by what a load failed with.

        Called by the event loop's thread.
        """
        self.closing, self.failure = True, failure or self.failure
        self.registry.stop(self._ended() or closing_error())
        self.memory.close()
        for cancel in list(self._running):
            cancel.cancel()

    def gauges(self) -> list[Gauge]:
        """Return the current values for the metrics."""
        queues, models = [entry.queue for entry in self.registry.entries], self.registry.models
        ready = not (self.closing or self.starting or self.failure)
        cap_bytes = models[0].engine.plan.cap_bytes if models else None
        return [
            Gauge("ready", "Whether the server answers requests.", float(ready)),
            Gauge("models_loaded", "Models that are loaded.", len(models)),
            Gauge("requests_running", "Requests that run.", sum(queue.n_running for queue in queues)),
            Gauge("requests_waiting", "Requests that wait.", sum(queue.n_waiting for queue in queues)),
            Gauge("parallel_limit", "Most requests of a model that may run at once.", self.settings.n_parallel),
            Gauge("queue_limit", "Most requests of a model that may wait.", self.settings.n_queue),
            Gauge("connections", "Open connections.", self.n_connections),
            Gauge("request_bytes", "Memory that requests hold.", self.memory.n_taken),
            Gauge("request_bytes_limit", "Most memory that requests may hold.", self.memory.n_total),
            Gauge("memory_cap_bytes", "Most memory that the process may hold.", cap_bytes),
            Gauge("memory_planned_bytes", "Most memory that the process holds by its plan.", _planned(models)),
            Gauge("load_seconds", "Seconds that loading the first models took.", self.load_s or None),
            Gauge("start_time_seconds", "Time when the server started, in seconds since 1970.", self.created),
            *memory_gauges(processes_of(*(loaded.engine for loaded in models))),
        ]


def _planned(models: list[Loaded]) -> int | None:
    """Return the bytes of all plans, what the models share counted once; None where nothing is planned."""
    if not models or not all(loaded.engine.plan.terms for loaded in models):
        return None
    shared = max(loaded.engine.plan.total_bytes - loaded.n_bytes for loaded in models)
    return shared + sum(loaded.n_bytes for loaded in models)


Handler = Callable[[Request, Service], Awaitable[ASGIApp]]


def endpoint(handler: Handler) -> Callable[[Request], Awaitable[ASGIApp]]:
    """Return an endpoint for a route: it passes the service to the handler, and answers the handler's errors."""

    async def answer(request: Request) -> ASGIApp:
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


def refusal(path: str, error: ApiError) -> Response:
    """Return an error as an answer."""
    return JSONResponse(error.document(path), error.status, error.headers)
