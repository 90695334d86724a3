"""Fixtures: a separate folder for all that is stored, a stub server, and no other network."""

import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.processes.servers import StubServer

from edgedec.load_options import ResolveOptions
from edgedec.progress import CancelToken, Progress
from edgedec_models import storage
from edgedec_models.fetching import web

_UNSET = [
    *("EDGEDEC_MODELS", "EDGEDEC_OFFLINE", "EDGEDEC_PYPI_INDEX", "HF_HUB_OFFLINE", "PIP_INDEX_URL"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
]


@pytest.fixture(scope="session")
def tls() -> ssl.SSLContext:
    """Return a context that trusts nobody, because loading certificates for each client takes most of the time."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tls: ssl.SSLContext) -> Path:
    """Return the root of a cache for these tests alone, with a space and an umlaut in its path."""
    for variable in _UNSET:
        monkeypatch.delenv(variable, raising=False)
    cache = tmp_path / "ein Käsch"
    monkeypatch.setenv("EDGEDEC_CACHE", str(cache))
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr(web, "BACKOFF_S", 0.001)
    monkeypatch.setattr(web, "TIMEOUT", 300.0)
    monkeypatch.setattr(web, "tls_context", lambda: tls)
    monkeypatch.setattr(storage, "MARGIN_BYTES", 0)
    return cache


@pytest.fixture(autouse=True)
def _only_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.create_connection

    def local_connect(address: tuple[str, int], *args: object, **options: object) -> socket.socket:
        assert address[0] == "127.0.0.1", f"a test reached for {address}"
        return connect(address, *args, **options)  # type: ignore[arg-type]  # passed on as it came

    monkeypatch.setattr(socket, "create_connection", local_connect)


@pytest.fixture(autouse=True)
def _close_hub_session() -> Iterator[None]:
    yield
    if "huggingface_hub" in sys.modules:
        sys.modules["huggingface_hub"].close_session()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubServer]:
    """Return a running stub server that is also the package index and the hub."""
    with StubServer() as stub:
        monkeypatch.setenv("EDGEDEC_PYPI_INDEX", f"{stub.root}/simple")
        monkeypatch.setenv("HF_ENDPOINT", stub.root)
        yield stub


@pytest.fixture
def catalogue(tmp_path: Path) -> Callable[[str], None]:
    """Return a function that writes the user's catalogue."""

    def write(text: str) -> None:
        folder = tmp_path / "config"
        folder.mkdir(exist_ok=True)
        (folder / "catalogue.toml").write_text(text, encoding="utf-8")

    return write


@pytest.fixture
def cancel_after() -> Callable[[int], ResolveOptions]:
    """Return a function that makes options which cancel after a number of downloaded bytes."""

    def options(n_bytes: int) -> ResolveOptions:
        cancel = CancelToken()

        def on_progress(progress: Progress) -> None:
            if progress.phase == "download" and progress.done >= n_bytes:
                cancel.cancel()

        return ResolveOptions(on_progress=on_progress, cancel=cancel)

    return options
