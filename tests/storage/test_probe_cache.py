"""What a measured time is remembered for: the machine, as far as it can be told from another one."""

import pytest

from edgedec.load_options import LoadOptions
from edgedec.storage import probe_cache
from edgedec.storage.probe_cache import machine_key, quietly


def test_another_cpu_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder that moves to another machine brings no times along."""
    here = machine_key(LoadOptions())
    assert machine_key(LoadOptions()) == here
    assert machine_key(LoadOptions(runtime_options={"huge_pages": "on"})) != here
    monkeypatch.setattr("edgedec.processor.cpu_name", lambda: "Another CPU")
    assert machine_key(LoadOptions()) != here


@pytest.mark.parametrize(("waited_s", "is_quiet"), [(0.02, True), (0.04, False)])
def test_a_machine_is_busy_where_others_take_the_processor(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, is_quiet: bool
) -> None:
    """What was measured then is not kept; the system itself takes the processor now and then."""
    counts = [7.0, 7.0 + waited_s]
    monkeypatch.setattr(probe_cache, "_waited_s", lambda: counts.pop(0))
    monkeypatch.setattr(probe_cache, "perf_counter", iter((1.0, 1.05)).__next__)
    assert quietly(lambda: "found") == ("found", is_quiet)
