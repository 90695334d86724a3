"""What the system says of the processor."""

import platform
from pathlib import Path

import pytest

from edgedec import processor
from edgedec.processor import cpu_facts, named_cpu

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


def test_the_facts_of_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are from the system's list; without one, Python's name stands for the model, and no feature is known."""
    listed = tmp_path / "cpuinfo"
    listed.write_text(f"{X86}flags\t\t: fpu avx2 fma\n", encoding="utf-8")
    monkeypatch.setattr(processor, "_CPUINFO", listed)
    assert cpu_facts() == ("Some CPU @ 2.50GHz", ["fpu", "avx2", "fma"])
    monkeypatch.setattr(processor, "_CPUINFO", tmp_path / "none")
    monkeypatch.setattr(platform, "processor", lambda: "Intel64 Family 6")
    assert cpu_facts() == ("Intel64 Family 6", [])
