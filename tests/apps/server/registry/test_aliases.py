"""A model of the server answers to the names that it has elsewhere, such as in ollama's library."""

from pathlib import Path

import pytest

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry.names import Names


def test_an_alias_is_the_model_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tag, without, or with :latest; a model that is not here has no name."""
    for name in ("EDGEDEC_CACHE", "EDGEDEC_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("EDGEDEC_MODELS", raising=False)
    (tmp_path / "models").mkdir()
    path = tmp_path / "models" / "llama3.2-3b.gguf"
    path.write_bytes(b"GGUF")
    names = Names(Settings())
    for name in ("llama3.2-3b", "llama3.2", "llama3.2:latest", "llama3.2:3b"):
        found = names.find(name)
        assert (found.name, found.recipe.model) == ("llama3.2-3b", str(path))
    for name in ("llama3.2:1b", "qwen3:4b", "nothing"):
        with pytest.raises(ApiError, match="there is no model"):
            names.find(name)
    with pytest.raises(ApiError, match=r"there is no model 'llama3' here; did you mean llama3\.2-3b\? GET /v1/models"):
        names.find("llama3")
    served = Names(Settings(models=("qwen3-4b",)))
    assert served.find("qwen3:4b") is served.served[0]
