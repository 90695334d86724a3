"""Fixtures: nothing of this machine's settings, a cache of our own, and tiny models on the reference runtime."""

import logging
import math
import os
from pathlib import Path

import pytest
from support.models.tiny_models import CHATML, tiny_llama


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the root of a cache of our own; what the commands take from the environment is unset."""
    for name in list(os.environ):
        if name.startswith(("EDGEDEC_", "HF_", "OLLAMA_", "PYTHONIOENCODING", "COLUMNS")):
            monkeypatch.delenv(name)
    root = tmp_path / "a cache"
    monkeypatch.setenv("EDGEDEC_CACHE", str(root))
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path / "config"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setenv("EDGEDEC_RUNTIME", "reference")
    monkeypatch.setenv("EDGEDEC_DRAFT", "off")  # else each command measures what rows cost, and speaks accordingly
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return root


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Draft as by default: for commands that are about that."""
    monkeypatch.delenv("EDGEDEC_DRAFT")


@pytest.fixture(autouse=True)
def quiet_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back what --verbose of another test in this process changed, and what this one will."""
    logger = logging.getLogger("edgedec")
    monkeypatch.setattr(logger, "handlers", [])
    monkeypatch.setattr(logger, "propagate", True)
    monkeypatch.setattr(logger, "level", logging.NOTSET)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template, 261 tokens and 2,048 tokens of context."""
    return tiny_llama(tmp_path_factory.mktemp("cli") / "tiny.gguf", chat_template=CHATML, n_ctx_train=2048, n_vocab=261)


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model without a chat template."""
    return tiny_llama(tmp_path_factory.mktemp("cli") / "plain.gguf", seed=1, n_layer=1, n_ctx_train=256)


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands in this process stop in their own time: how soon they do is the machine's, and not told then."""
    monkeypatch.setattr("edgedec_apps.cli.interrupts._PATIENCE_S", math.inf)
