"""Fixtures: a tiny model that chats, on the cpu runtime."""

from collections.abc import Iterator

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.running_server import CHAT

import edgedec


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgedec.Engine]:
    """A model whose tokens are bytes, with 600 tokens of context."""
    path = tiny_llama(tmp_path_factory.mktemp("documents") / "tiny.gguf", chat_template=CHAT, n_ctx_train=4096)
    with edgedec.load(path, runtime="cpu", n_ctx=600, draft="off") as engine:
        yield engine
