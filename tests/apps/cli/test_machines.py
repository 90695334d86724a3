"""Machines that are planned for without having them."""

import math
from pathlib import Path
from unittest.mock import Mock

import pytest

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import Device, MemoryTerm
from edgedec_apps.cli.reports.machines import Machine, RuntimeThere, machine_of
from edgedec_runtimes.reference.runtime import Reference

CUDA0 = Device("CUDA0", "CUDA", 8 * 10**9, 7 * 10**9, driver_bytes=400_000_000)


def test_a_machine_that_is_not_here_is_planned_for_and_not_loaded_on(tmp_path: Path) -> None:
    """The machines by name; an unknown one is refused with the names."""
    assert machine_of("jetson-orin-nano-8gb").devices[0].unified
    with pytest.raises(RequestError, match="rtx-4060-laptop"):
        machine_of("cray-1")
    sizes = {"raspberry-pi-zero-2": 0.5, "raspberry-pi-3": 1, "raspberry-pi-4-2gb": 2, "raspberry-pi-5-16gb": 16}
    for name, n_gb in sizes.items():
        machine = machine_of(name)
        assert 0.5 < machine.free_bytes / (n_gb * 10**9) < 1
        assert machine.speed("smollm2-135m") == "not measured on that machine"
    assert Machine(1, 0, tokens_per_s={"a": 9.5}).speed("a") == "9.5 tokens/s, measured"
    there = RuntimeThere(Reference(), Machine(8 * 10**9, 0, (CUDA0,)))
    assert there.devices(LoadOptions()) == (CUDA0,)
    with pytest.raises(RuntimeUnavailableError, match="no device 'CUDA1'; it has CUDA0"):
        there.devices(LoadOptions(device="CUDA1"))
    streamed = MemoryTerm("weights (streamed)", 5, "3 MB more are read for each token: 1 s with 3 MB/s", slowdown=2.0)
    there.runtime = Mock(plan=lambda path, options: (MemoryTerm("KV cache", 1), streamed))
    assert [(term.detail, term.slowdown) for term in there.plan(tmp_path, LoadOptions())] == [
        ("", 1.0),
        ("3 MB more are read for each token; its disk was not measured", math.inf),
    ]
    with pytest.raises(RuntimeUnavailableError):
        there.load(tmp_path, LoadOptions())
