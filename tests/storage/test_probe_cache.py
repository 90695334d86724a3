"""What a measured time is remembered for: the machine, as far as it can be told from another one."""

import pytest

from edgedec.load_options import LoadOptions
from edgedec.storage.probe_cache import machine_key, named_cpu

X86 = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Some CPU @ 2.50GHz

processor\t: 1
model name\t: Some CPU @ 2.50GHz
"""
ARM = """processor\t: 0
CPU implementer\t: 0x41
CPU part\t: 0xd05

processor\t: 1
CPU implementer\t: 0x41
CPU part\t: 0xd0b
"""


@pytest.mark.parametrize(("text", "name"), [(X86, "Some CPU @ 2.50GHz"), (ARM, "0x41 0xd05 0xd0b"), ("", "")])
def test_a_cpu_is_named_by_its_model_or_its_parts(text: str, name: str) -> None:
    """Whatever else /proc/cpuinfo says, such as clock rates that change."""
    assert named_cpu(text.splitlines(keepends=True)) == name


def test_another_cpu_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder that moves to another machine brings no times along."""
    here = machine_key(LoadOptions())
    assert machine_key(LoadOptions()) == here
    assert machine_key(LoadOptions(runtime_options={"huge_pages": "on"})) != here
    monkeypatch.setattr("edgedec.storage.probe_cache.cpu_name", lambda: "Another CPU")
    assert machine_key(LoadOptions()) != here
