"""What a measured time is remembered for: the machine, as far as it can be told from another one."""

import pytest

from edgedec.load_options import LoadOptions
from edgedec.storage.probe_cache import machine_key


def test_another_cpu_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder that moves to another machine brings no times along."""
    here = machine_key(LoadOptions())
    assert machine_key(LoadOptions()) == here
    assert machine_key(LoadOptions(runtime_options={"huge_pages": "on"})) != here
    monkeypatch.setattr("edgedec_runtimes.shared.processor.cpu_name", lambda: "Another CPU")
    assert machine_key(LoadOptions()) != here
