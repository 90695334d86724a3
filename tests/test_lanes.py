"""The quick lane holds what is promised, within 180 CPU seconds."""

import os
from types import SimpleNamespace
from typing import Any

import pytest
from support import lanes

MOST_SECONDS = 180


def collected(request: pytest.FixtureRequest) -> list[str]:
    """Return the ids of the quick lane's tests; skips where a run is of a part of them, or of another lane."""
    if lanes.COLLECTED not in request.config.stash:
        pytest.skip("not a run of the whole quick lane")
    return request.config.stash[lanes.COLLECTED]


def test_every_promise_has_tests() -> None:
    """Each names tests of files that exist, each once; and each was passed where the durations were recorded."""
    files = lanes.recorded()["files"]
    for promise, tests in lanes.promises().items():
        assert promise.endswith("."), promise
        assert tests, promise
        assert len(set(tests)) == len(tests), promise
        for test in tests:
            file, _, name = test.partition("::")
            passed = {each: n for each, (_, n, _) in files.get(file, {}).items()}
            assert passed.get(name.partition("[")[0], 0) if name else any(passed.values()), f"{test} was not passed"


def test_every_guard_is_there(request: pytest.FixtureRequest) -> None:
    """The quick lane has each test that a promise names, with an environment of the extra `test` alone, too."""
    assert lanes.unmatched(collected(request)) == []


def test_the_quick_lane_is_quick(request: pytest.FixtureRequest) -> None:
    """By the durations that are recorded; a test without one counts 2 seconds."""
    assert lanes.recorded()["seconds"] <= MOST_SECONDS
    assert lanes.seconds(collected(request)) <= MOST_SECONDS


def test_a_worker_starts_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of pytest-xdist chooses the lane that its run chose, and begins no processes of its own."""
    lane = {"markexpr": lanes.QUICK, "numprocesses": None, "dist": "no"}
    plugins: Any = SimpleNamespace(has_plugin=lambda _: True)
    for name, expected in (("gw0", lane), (None, lane | {"numprocesses": 2, "dist": "loadfile"})):
        options = lane | {"markexpr": "", "usepdb": False, "collectonly": False, "durations_out": None}
        config: Any = SimpleNamespace(option=SimpleNamespace(**options), args_source=None, pluginmanager=plugins)
        monkeypatch.setattr(os, "cpu_count", lambda: 8)
        monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
        if name is not None:
            monkeypatch.setenv("PYTEST_XDIST_WORKER", name)
        lanes.pytest_cmdline_main(config)
        assert expected.items() <= vars(config.option).items()
