"""A server in this process, on a free port, and how tests talk to it."""

import faulthandler
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

import edgedec
from edgedec.api.options import EngineOptions
from edgedec.progress import CancelToken
from edgedec_apps.server.core.budget import RequestQueue
from edgedec_apps.server.core.service import OfferedTools, Service
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry.models import Loaded, Prepare, Prepared, Recipe
from edgedec_apps.server.registry.names import shown_name
from edgedec_apps.server.registry.opener import Opener
from edgedec_apps.server.registry.registry import ModelEntry
from edgedec_apps.server.serving import address_of, open_socket, serve

PATIENCE_S = 60.0
CHAT = (
    "{% if tools %}<tools>{{ tools | tojson }}</>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Running:
    """A server that runs: where, its state, and the models behind it."""

    url: str
    service: Service
    client: httpx.Client

    @property
    def entry(self) -> ModelEntry:
        """The entry of the first model of the settings."""
        return self.service.registry.entry(self.service.names.served[0].recipe)

    @property
    def engine(self) -> edgedec.Engine:
        """The first model of the settings, which is loaded."""
        return self.engine_of(self.service.names.served[0].name)

    @property
    def queue(self) -> RequestQueue:
        """The requests of the first model of the settings."""
        return self.entry.queue

    def engine_of(self, name: str) -> edgedec.Engine:
        """Return the engine of a model that is loaded."""
        loaded = self.service.registry.entry(self.service.names.find(name).recipe).loaded
        assert loaded is not None
        return loaded.engine

    def posting(self, body: bytes, n_bytes: int = 0, path: str = "/v1/chat/completions") -> socket.socket:
        """Return a connection on which a body was posted, of `n_bytes` in all where that is more than these."""
        host, port = self.url.removeprefix("http://").split(":")
        connection = socket.create_connection((host, int(port)), PATIENCE_S)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {n_bytes or len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        return connection

    @property
    def loaded(self) -> list[str]:
        """The names of the files that are loaded, the least recently used first."""
        return [shown_name(entry.recipe.model) for entry in self.service.registry.loaded]


@contextmanager
def started(
    *paths: Path,
    load_options: dict[str, Any] | None = None,
    adapt: Callable[[Prepare], Prepare] = lambda prepare: prepare,
    tools: OfferedTools | None = None,
    **settings: Any,
) -> Iterator[Running]:
    """Serve models in this process until the end of the block, and end as Ctrl-C does; `adapt` wraps the loading."""
    chosen = Settings(models=tuple(map(str, paths)), port=0, **settings)
    listener = open_socket(chosen)
    cancel, ready, services = CancelToken(), threading.Event(), list[Service]()
    failures: list[BaseException] = []
    given: dict[str, Any] = {"runtime": "cpu", "n_ctx": 512, "draft": "off", "n_parallel": chosen.n_parallel}
    options = EngineOptions(**given | (load_options or {}))
    opener = Opener(chosen.models, options, options, 0, nullcontext, print)

    def on_ready(service: Service) -> None:
        services.append(service)
        ready.set()

    def run() -> None:
        try:
            serve(chosen, listener, adapt(opener.prepare), cancel, on_ready, tools)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, name="test-server")
    thread.start()
    try:
        assert ready.wait(PATIENCE_S), failures
        url = address_of(listener)
        headers = {} if chosen.api_key is None else {"authorization": f"Bearer {chosen.api_key}"}
        with httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers) as client:
            yield Running(url, services[0], client)
    finally:
        cancel.cancel()
        thread.join(PATIENCE_S)
        if thread.is_alive():
            faulthandler.dump_traceback(2)
        assert not thread.is_alive(), "the server does not end; where its threads are was written to stderr"
    assert not failures


def room_for(n_models: int) -> Callable[[Prepare], Prepare]:
    """Return what makes a server believe that only so many models fit into its memory."""

    def adapt(prepare: Prepare) -> Prepare:
        n_loaded = 0

        def limited(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            prepared = prepare(recipe, n_ctx, cancel)

            def opened() -> Loaded:
                nonlocal n_loaded
                loaded = prepared.open()
                n_loaded += 1

                def close() -> None:
                    nonlocal n_loaded
                    n_loaded -= 1
                    loaded.close()

                return replace(loaded, close=close)

            return replace(prepared, fits=n_loaded < n_models, open=opened)

        return limited

    return adapt


def messages(text: str) -> list[dict[str, str]]:
    """Return a chat of one message."""
    return [{"role": "user", "content": text}]


ENDLESS: dict[str, Any] = {"messages": messages("Go on"), "ignore_end": True, "stream": True, "temperature": 0}
"""A chat that goes on until the context is full."""


def metric(running: Running, name: str) -> float:
    """Return a value of /metrics, 0 where there is none."""
    for line in running.client.get("/metrics").text.splitlines():
        if line.startswith(f"edgedec_{name} "):
            return float(line.rpartition(" ")[2])
    return 0.0


def places(value: Any) -> list[tuple[Any, Any]]:
    """Return all containers within a value of JSON with the keys of their entries."""
    found: list[tuple[Any, Any]] = []
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            found += [(value, key), *places(value[key])]
    return found


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.01)
