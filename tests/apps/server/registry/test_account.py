"""The registry of a server's models: what is held beside them while they come and go, and their other names."""

from pathlib import Path

import pytest

from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry import opener
from edgedec_apps.server.registry.names import Names
from edgedec_apps.server.registry.opener import Account, planning_need

MB = 1_000_000


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the process holds, in MB, by the tests of this file: the last of the list."""
    figures = [0]
    monkeypatch.setattr(opener, "resident_bytes", lambda: figures[-1] * MB)
    return figures


def test_what_an_unloaded_model_leaves_behind_is_in_the_first_plan(held: list[int]) -> None:
    """Without a model the base is the same for up to 24 MB more, and the 9 MB of each plan; more counts while held."""
    account = Account(46 * MB)
    found = [account.base_bytes // MB]
    for n_mb in (46, 55, 79, 130, 100, 60):
        held.append(n_mb)
        found.append(account.measure() // MB)
        assert found[-1] == account.base_bytes // MB
    assert found == [70, 70, 70, 70, 121, 91, 70]


def test_what_models_did_not_hold_at_first_is_beside_them(held: list[int]) -> None:
    """While models are loaded the base stays as it is, and what they took since is counted beside their plans."""
    account, first, second = Account(46 * MB), object(), object()
    held.append(270)
    account.open(first, 300 * MB, 70 * MB)
    held.append(280)
    account.open(second, 20 * MB, 270 * MB)
    assert (account.others, account.planned_bytes) == (True, 320 * MB)
    assert account.measure() == 70 * MB
    held.append(330)
    assert (account.measure(), account.base_bytes) == ((330 - 210 - 9) * MB, 70 * MB)
    account.close(first)
    account.close(first)
    held.append(130)
    assert (account.measure(), account.planned_bytes) == ((130 - 10 - 9) * MB, 20 * MB)
    account.close(second)
    held.append(100)
    assert (account.measure(), account.base_bytes, account.others) == (91 * MB, 91 * MB, False)


def test_planning_needs_no_more_than_a_large_vocabulary(tmp_path: Path) -> None:
    """A small file needs little; a large one, or a folder, no more than the largest vocabulary takes."""
    small, large = tmp_path / "small.gguf", tmp_path / "large.gguf"
    small.write_bytes(b"x" * 2 * MB)
    with large.open("wb") as file:
        file.truncate(500 * MB)
    assert [planning_need(path) for path in (small, large, tmp_path)] == [9 * MB, 80 * MB, 80 * MB]


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
