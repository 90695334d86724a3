"""Fixtures: servers of a tiny model on the cpu runtime."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.seeing_model import seeing_model
from support.models.tiny_models import tiny_llama
from support.processes.running_server import CHAT, Running, started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    """OpenAI's client, pointed at the server of the file."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="session")
def chat_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template that knows tools."""
    return tiny_llama(tmp_path_factory.mktemp("server") / "tiny.gguf", chat_template=CHAT, n_ctx_train=4096)


@pytest.fixture(scope="session")
def server(chat_path: Path) -> Iterator[Running]:
    """A server of the tiny model, three requests at once."""
    with started(chat_path, n_parallel=3, aliases=("tiny-alias",)) as running:
        yield running


@pytest.fixture(scope="session")
def endless(chat_path: Path) -> Iterator[Running]:
    """A server of so long a context that only a limit or a disconnect ends a text; one runs, one may wait."""
    with started(chat_path, load_options={"n_ctx": 100_000}, n_queue=1) as running:
        yield running


@pytest.fixture(scope="session")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that reads pictures, two requests at once, with drafts; skipped where none can be read."""
    pytest.importorskip("llama_cpp", reason="llama-cpp-python encodes the pictures")
    pytest.importorskip("PIL", reason="Pillow decodes the pictures")
    path = seeing_model(tmp_path_factory.mktemp("seeing"))
    options = {"n_ctx": 1024, "draft": "suffix", "projector": path.parent / "mmproj-seeing.gguf"}
    with started(path, n_parallel=2, load_options=options) as running:
        yield running
