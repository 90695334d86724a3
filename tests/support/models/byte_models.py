"""Fixtures: a tiny model whose tokens are bytes, and grammars for its vocabulary."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgedec.decoding.grammars import Grammars
from edgedec.load_options import LoadOptions
from edgedec.model import Model
from edgedec_runtimes.cpu.runtime import Cpu
from support.models.tiny_models import tiny_llama


@pytest.fixture(scope="session")
def byte_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that is quick to run."""
    path = tmp_path_factory.mktemp("grammar") / "tiny.gguf"
    return tiny_llama(path, seed=1, n_layer=1, n_embd=32, n_ff=32, n_head=2, n_head_kv=1, n_ctx_train=1024)


@pytest.fixture(scope="session")
def byte_model(byte_path: Path) -> Iterator[Model]:
    """It, loaded."""
    with Cpu().load(byte_path, LoadOptions(n_ctx=128, n_threads=1, max_rows=16)) as model:
        yield model


@pytest.fixture(scope="session")
def grammars(byte_model: Model) -> Grammars:
    """What opens grammars for it."""
    return Grammars(byte_model.tokenizer)
