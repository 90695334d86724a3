"""What all requests share: the model while it loads and when it is there, the queue, the counters, the end."""

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
        path: Where it is.
        info: What its header says, where that is a GGUF's.
        modified_s: When it was last changed, in seconds since 1970.
        template: Source of the chat template that is used, or None.
    """

    path: Path
    info: ModelInfo | None
    modified_s: float
    template: str | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that is there.

    Attributes:
        engine: The model.
        file: Its file.
        close: Frees it, and may save something first.
        room_bytes: What the memory plan keeps for requests; None where nothing was planned.
    """

    engine: Engine
    file: ModelFile
    close: Callable[[], None]
    room_bytes: int | None = None


@dataclass(slots=True)
class Service:
    """The state of a server. Written by the thread that loads and ends it, read by its event loop.

    Attributes:
        settings: What it was told.
        loaded: The model, once it is there.
        failure: Why it could not be loaded.
        closing: Set once, when the server ends.
        slots: Who is worked on and who waits.
        room: Memory for requests.
        metrics: What was counted.
        created: When the server began, in seconds since 1970.
        load_s: What loading took.
        n_connections: Connections that there are.
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
        """What the model is called in answers: the name it was given; of a file or folder, only its own name."""
        given = Path(self.settings.model)
        if given.suffix.lower() == ".gguf":
            return given.stem
        return given.resolve().name if given.is_dir() else self.settings.model

    def ready(self) -> Loaded:
        """Return the model.

        Raises:
            ApiError: It is still loading, failed to load, or the server ends (503).
        """
        if self.closing:
            raise closing_error()
        if self.failure is not None:
            raise ApiError(f"the model could not be loaded: {self.failure}", status=503, code="model_failed")
        if self.loaded is None:
            raise ApiError("the model is still loading", status=503, code="loading", retry_after_s=2)
        return self.loaded

    def require_name(self, asked: str) -> str:
        """Return the model's name, whichever of its names was asked for.

        Raises:
            ApiError: The server has another model (404).
        """
        known = {self.name, self.settings.model, *self.settings.aliases}
        if asked in known or asked.removesuffix(":latest") in known:
            return self.name
        raise ApiError(
            f"the model {asked!r:.200} is not served here; this server has {self.name!r} (--alias gives it more names)",
            status=404,
            code="model_not_found",
            param="model",
        )

    @contextmanager
    def running(self, cancel: CancelToken) -> Iterator[None]:
        """Let close() stop the work of the block."""
        self._running.add(cancel)
        try:
            yield
        finally:
            self._running.discard(cancel)

    def stop(self) -> None:
        """Refuse what comes and stop what runs; called by the event loop's thread."""
        self.closing = True
        for cancel in list(self._running):
            cancel.cancel()

    def gauges(self) -> list[Gauge]:
        """Return the values of this moment for the metrics."""
        plan = None if self.loaded is None else self.loaded.engine.plan
        planned = plan.total_bytes if plan is not None and plan.terms else None
        return [
            Gauge("ready", "Whether the model is there.", float(self.loaded is not None and not self.closing)),
            Gauge("requests_running", "Requests worked on.", self.slots.n_running),
            Gauge("requests_waiting", "Requests that wait.", self.slots.n_waiting),
            Gauge("parallel_limit", "Requests that may be worked on at once.", self.slots.n_parallel),
            Gauge("queue_limit", "Requests that may wait.", self.slots.n_queue),
            Gauge("connections", "Connections.", self.n_connections),
            Gauge("request_bytes", "Memory that requests take until they are answered.", self.room.n_taken),
            Gauge("request_bytes_limit", "Most memory that they may take.", self.room.n_bytes),
            Gauge("memory_cap_bytes", "What the process may hold.", None if plan is None else plan.cap_bytes),
            Gauge("memory_planned_bytes", "What it was planned to hold at the most.", planned),
            Gauge("load_seconds", "What loading the model took.", self.load_s or None),
            Gauge("start_time_seconds", "When the server began, since 1970.", self.created),
        ]


def closing_error() -> ApiError:
    """Return the answer to requests that come, or are worked on, when the server ends."""
    return ApiError("the server is shutting down", status=503, code="shutting_down", retry_after_s=5)
