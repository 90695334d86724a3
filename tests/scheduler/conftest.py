"""A clock that stands still unless told, in place of the scheduler's."""

import pytest
from support.decoding.simulation import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The policy's clock."""
    fake = Clock()
    monkeypatch.setattr("edgedec.scheduler.policy.perf_counter", fake)
    monkeypatch.setattr("edgedec.scheduler.active_drafters.perf_counter", fake)
    monkeypatch.setattr("edgedec.scheduler.active_drafters.monotonic", fake)
    return fake
