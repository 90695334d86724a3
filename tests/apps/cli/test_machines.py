"""Machines that are planned for without having them."""

from pathlib import Path

import pytest

from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.load_options import LoadOptions
from edgedec.memory_plan import Device
from edgedec_apps.cli.reports.machines import Machine, RuntimeThere, machine_of
from edgedec_runtimes.reference.runtime import Reference

CUDA0 = Device("CUDA0", "CUDA", 8 * 10**9, 7 * 10**9, driver_bytes=400_000_000)


def test_a_machine_that_is_not_here_is_planned_for_and_not_loaded_on(tmp_path: Path) -> None:
    """The machines by name; an unknown one is refused with the names."""
    assert machine_of("jetson-orin-nano-8gb").devices[0].unified
    with pytest.raises(RequestError, match="rtx-4060-laptop"):
        machine_of("cray-1")
    there = RuntimeThere(Reference(), Machine(8 * 10**9, 0, (CUDA0,)))
    assert there.devices(LoadOptions()) == (CUDA0,)
    with pytest.raises(RuntimeUnavailableError, match="no device 'CUDA1'; it has CUDA0"):
        there.devices(LoadOptions(device="CUDA1"))
    with pytest.raises(RuntimeUnavailableError):
        there.load(tmp_path, LoadOptions())
