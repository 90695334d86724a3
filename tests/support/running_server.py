"""A server in this process, on a free port, and how tests talk to it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_info import describe
from edgedec.progress import CancelToken
from edgedec_apps.server.service import Loaded, ModelFile, Service
from edgedec_apps.server.serving import address_of, open_socket, serve
from edgedec_apps.server.settings import Settings

PATIENCE_S = 60.0
CHAT = (
    "{% if tools %}<tools>{{ tools | tojson }}</>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@dataclass
class Running:
    """A server that runs: where, its state, and the engine behind it."""

    url: str
    service: Service
    client: httpx.Client

    @property
    def engine(self) -> edgedec.Engine:
        """The model."""
        assert self.service.loaded is not None
        return self.service.loaded.engine


@contextmanager
def started(path: Path, *, load_options: dict[str, Any] | None = None, **settings: Any) -> Iterator[Running]:
    """Serve a model in this process until the end of the block, and end as Ctrl-C does."""
    chosen = Settings(model=str(path), port=0, **settings)
    listener = open_socket(chosen)
    cancel, ready, services = CancelToken(), threading.Event(), list[Service]()
    failures: list[BaseException] = []

    def load(_cancel: CancelToken) -> Loaded:
        options: dict[str, Any] = {"runtime": "cpu", "n_ctx": 512, "draft": "off", "n_parallel": chosen.n_parallel}
        engine = edgedec.load(path, **options | (load_options or {}))
        file = ModelFile(path, describe(read_gguf(path)), path.stat().st_mtime, engine.card.chat_template)
        return Loaded(engine, file, engine.close)

    def on_ready(service: Service) -> None:
        services.append(service)
        ready.set()

    def run() -> None:
        try:
            serve(chosen, listener, load, cancel, on_ready)
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
        assert not thread.is_alive()
    assert not failures


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


def wait_until(holds: Callable[[], bool], what: str) -> None:
    """Wait until something holds."""
    until = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until, what
        time.sleep(0.01)
