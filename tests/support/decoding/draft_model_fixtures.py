"""Fixtures: tiny models to draft with."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from edgedec.drafters.draft_model import draft_text
from edgedec.model import Model
from support.decoding.draft_models import loaded, tiny


@pytest.fixture
def prompts_are_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read more of a prompt than TEXT is long, so that draft model and target see the same."""
    monkeypatch.setattr(draft_text, "_FIRST", 256)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the models are."""
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def target(folder: Path) -> Path:
    """The target's file."""
    return tiny(folder, 1)


@pytest.fixture(params=[1, 2], ids=["the target", "another"])
def draft_model(request: pytest.FixtureRequest, folder: Path) -> Iterator[Model]:
    """A draft model: the target itself, or one that is nearly always wrong."""
    with loaded(tiny(folder, request.param)) as model:
        yield model
