"""Fixtures of the cpu runtime's tests."""

from pathlib import Path

import pytest
from support.models.tile_maker import Maker
from support.models.tiny_models import tiny_llama


@pytest.fixture
def maker(tmp_path: Path) -> Maker:
    """A tiny model and an empty cache."""
    return Maker(tiny_llama(tmp_path / "m.gguf", n_layer=1, n_embd=8, n_ff=16), tmp_path / "ein Käsch")
