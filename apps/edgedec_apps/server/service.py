"""The state that all requests share: the model or its loading, the queue, the counters, and the server's end."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from edgedec.api.engine import Engine
from edgedec.errors import EdgedecError
from edgedec.gguf.model_info import ModelInfo
from edgedec.progress import CancelToken
from edgedec_apps.server.errors import ApiError
from edgedec_apps.server.metrics import Gauge, Metrics
from edgedec_apps.server.room import Room
from edgedec_apps.server.settings import Settings
from edgedec_apps.server.slots import Slots


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A model's file.

    Attributes:
        path: The path of the file.
        info: The facts in the header of a GGUF; else None.
        modified_s: Time of the last change, in seconds since 1970.
        template: Source of the chat template in use, or None.
    """

    path: Path
    info: ModelInfo | None
    modified_s: float
    template: str | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model.

    Attributes:
        engine: The engine of the model.
        file: The model's file.
        close: Frees the model, after saving what is to be kept.
        room_bytes: Memory that the plan keeps for requests; None without a plan.
    """

    engine: Engine
    file: ModelFile
    close: Callable[[], None]
    room_bytes: int | None = None


@dataclass(slots=True)
class Service:
    """The state of a server. Written by the thread that loads and ends it, read by its event loop.

    Attributes:
        settings: The server's settings.
        loaded: The model, once it is loaded.
        failure: The error that loading ended with, if any.
        closing: Whether the server is ending.
        slots: The requests that run and that wait.
        room: Memory for requests.
        metrics: The counters.
        created: Time when the server started, in seconds since 1970.
        load_s: Seconds that loading took.
        n_connections: Number of open connections.
    """

    settings: Settings
    loaded: Loaded | None = None
    failure: EdgedecError | None = None
    closing: bool = False
    slots: Slots = field(init=False)
    room: Room = field(init=False)
    metrics: Metrics = field(default_factory=Metrics)
    created: int = field(default_factory=lambda: int(time.time()))
    load_s: float = 0.0
    n_connections: int = 0
    _running: set[CancelToken] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.slots = Slots(self.settings.n_parallel, self.settings.n_queue)
        self.room = Room(self.settings.room_bytes)

    @property
    def name(self) -> str:
        """The model's name in answers: as the command line has it, without the folder of a path."""
        given = Path(self.settings.model)
        if given.suffix.lower() == ".gguf":
            return given.stem
        return given.resolve().name if given.is_dir() else self.settings.model

    def ready(self) -> Loaded:
        """Return the model.

        Raises:
            ApiError: The model is loading or failed to load, or the server is ending (503).
        """
        if self.closing:
            raise closing_error()
        if self.failure is not None:
            raise ApiError(f"the model could not be loaded: {self.failure}", status=503, code="model_failed")
        if self.loaded is None:
            raise ApiError("the model is still loading", status=503, code="loading", retry_after_s=2)
        return self.loaded

    def require_name(self, name: str) -> str:
        """Return the model's own name for any of its names.

        Raises:
            ApiError: The server has another model (404).
        """
        known = {self.name, self.settings.model, *self.settings.aliases}
        if name in known or name.removesuffix(":latest") in known:
            return self.name
        raise ApiError(
            f"the model {name!r:.200} is not served here; this server has {self.name!r} (--alias adds names)",
            status=404,
            code="model_not_found",
            param="model",
        )

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
        for cancel in list(self._running):
            cancel.cancel()

    def gauges(self) -> list[Gauge]:
        """Return the current values for the metrics."""
        plan = None if self.loaded is None else self.loaded.engine.plan
        planned = plan.total_bytes if plan is not None and plan.terms else None
        return [
            Gauge("ready", "Whether the model is loaded.", float(self.loaded is not None and not self.closing)),
            Gauge("requests_running", "Requests that run.", self.slots.n_running),
            Gauge("requests_waiting", "Requests that wait.", self.slots.n_waiting),
            Gauge("parallel_limit", "Most requests that may run at once.", self.slots.n_parallel),
            Gauge("queue_limit", "Most requests that may wait.", self.slots.n_queue),
            Gauge("connections", "Open connections.", self.n_connections),
            Gauge("request_bytes", "Memory that requests hold.", self.room.n_taken),
            Gauge("request_bytes_limit", "Most memory that requests may hold.", self.room.n_bytes),
            Gauge(
                "memory_cap_bytes", "Most memory that the process may hold.", None if plan is None else plan.cap_bytes
            ),
            Gauge("memory_planned_bytes", "Most memory that the process holds by its plan.", planned),
            Gauge("load_seconds", "Seconds that loading the model took.", self.load_s or None),
            Gauge("start_time_seconds", "Time when the server started, in seconds since 1970.", self.created),
        ]


def closing_error() -> ApiError:
    """Return the error of requests that arrive or run while the server ends."""
    return ApiError("the server is shutting down", status=503, code="shutting_down", retry_after_s=5)
