"""The account of a server's memory: what is held beside the models, measured while they come and go."""

from pathlib import Path

import pytest

from edgedec_apps.server.registry import opener
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
