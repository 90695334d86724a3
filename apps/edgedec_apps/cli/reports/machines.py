"""Machines that a memory plan can be made for without having them: their memory, and their GPUs.

What a machine has free is its memory less what is assumed for its system; what drivers take is assumed as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from edgedec.callers import did_you_mean
from edgedec.errors import RequestError, RuntimeUnavailableError
from edgedec.load_options import LoadOptions, own_options
from edgedec.memory_plan import Device, IsOver, MemoryPlan, MemoryTerm, Split
from edgedec.model import Model
from edgedec.runtime import Runtime
from edgedec_runtimes.shared.device_account import with_measured_drivers
from edgedec_runtimes.shared.layer_split import split_layers, whole_split

_GB, _MIB = 10**9, 2**20
_VIDEO = 70_000_000  # that the firmware of a Raspberry Pi keeps
_BASE_BYTES = 60_000_000  # of Python with edgedec's packages on Linux
_LITE, _NO_DESKTOP, _DESKTOP, _BOTH = 150_000_000, 500_000_000, 1_500_000_000, 2_500_000_000


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine.

    Attributes:
        total_bytes: Its memory.
        system_bytes: What its system is assumed to hold.
        devices: Its GPUs.
        base_bytes: What Python and edgedec's packages are assumed to hold before a model is loaded.
        tokens_per_s: Tokens per second by the model's name, of models that were measured on such a machine.
    """

    total_bytes: int
    system_bytes: int
    devices: tuple[Device, ...] = ()
    base_bytes: int = _BASE_BYTES
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)

    def speed(self, model: str) -> str:
        """Return how fast a model is there, for a person; only what was measured there is told."""
        rate = self.tokens_per_s.get(model)
        return "not measured on that machine" if rate is None else f"{rate:g} tokens/s, measured"

    @property
    def free_bytes(self) -> int:
        """The bytes that are free before edgedec starts."""
        return self.total_bytes - self.system_bytes


def _jetson(n_gb: int, name: str) -> Machine:
    total = n_gb * _GB * 95 // 100  # the firmware keeps a part
    free = total - _DESKTOP
    device = Device("CUDA0", "CUDA", total, free, unified=True, driver_bytes=400_000_000, description=name)
    return Machine(total, _DESKTOP, (device,))


def _laptop(n_gb: int, n_gpu_mib: int, name: str) -> Machine:
    n_gpu_bytes = n_gpu_mib * _MIB
    free = n_gpu_bytes - 500_000_000  # the screen's
    device = Device("CUDA0", "CUDA", n_gpu_bytes, free, driver_bytes=400_000_000, description=name)
    return Machine(n_gb * _GB, _BOTH, (device,))


def _mac(n_gb: int, name: str) -> Machine:
    total = n_gb * 2**30
    free = total * 2 // 3  # what Metal recommends as the most for a GPU on machines of this size
    device = Device("MTL0", "MTL", total, free, unified=True, driver_bytes=200_000_000, description=name)
    return Machine(total, _BOTH, (device,))


MACHINES: Mapping[str, Machine] = {
    "raspberry-pi-zero-2": Machine(_GB // 2 - _VIDEO, _LITE),
    "raspberry-pi-3": Machine(_GB - _VIDEO, _LITE),
    **{f"raspberry-pi-4-{n}gb": Machine(n * _GB - _VIDEO, min(_NO_DESKTOP, n * _LITE)) for n in (1, 2, 4, 8)},
    **{f"raspberry-pi-5-{n}gb": Machine(n * _GB - _VIDEO, min(_NO_DESKTOP, n * _LITE)) for n in (2, 4, 8, 16)},
    "jetson-orin-nano-4gb": _jetson(4, "Orin Nano"),
    "jetson-orin-nano-8gb": _jetson(8, "Orin Nano"),
    "jetson-orin-nx-16gb": _jetson(16, "Orin NX"),
    "rtx-4060-laptop": _laptop(16, 8188, "RTX 4060 Laptop"),
    "apple-8gb": _mac(8, "Apple"),
    "apple-16gb": _mac(16, "Apple"),
}
"""The machines by name."""


def machine_of(name: str) -> Machine:
    """Return the machine of that name (RequestError where there is none)."""
    if name not in MACHINES:
        like = did_you_mean(name, MACHINES) or f"; it must be one of {', '.join(MACHINES)}"
        raise RequestError(f"{name!r} is no machine that is known{like}")
    return MACHINES[name]


class RuntimeThere:
    """A runtime as it would be on another machine: it plans, with that machine's devices, and loads nothing."""

    def __init__(self, runtime: Runtime, machine: Machine) -> None:
        self.name = runtime.name
        self.own_options = own_options(runtime)
        self.runtime = runtime
        self.machine = machine

    def accepts(self, path: Path) -> str | None:
        """Return what the runtime says here."""
        return self.runtime.accepts(path)

    def devices(self, options: LoadOptions) -> tuple[Device, ...]:
        """Return the machine's devices, or the one that is named (RuntimeUnavailableError where it has none such)."""
        devices = tuple(device for device in self.machine.devices if options.device in (None, device.name))
        if options.device is not None and not devices:
            names = ", ".join(device.name for device in self.machine.devices) or "none"
            raise RuntimeUnavailableError(f"that machine has no device {options.device!r}; it has {names}")
        return with_measured_drivers(devices, self.name, options.cache_dir)

    def split(self, names: Sequence[str], n_layers: int, is_over: IsOver, *, whole: bool) -> Split:
        """Return how many layers each device takes, the nearest one filled first."""
        return whole_split(names, n_layers, is_over) if whole else split_layers(names, n_layers, is_over)

    def account(self, plan: MemoryPlan, options: LoadOptions) -> MemoryPlan:
        """Return the plan as it is: nothing is loaded there."""
        return plan

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms, which the runtime finds without the devices; this machine's disk says nothing there."""
        return tuple(
            term
            if term.slowdown == 1
            else replace(term, slowdown=math.inf, detail=f"{term.detail.partition(':')[0]}; its disk was not measured")
            for term in self.runtime.plan(path, options)
        )

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Refuse: nothing can be loaded there."""
        raise RuntimeUnavailableError("this machine is another one; leave the machine's name out to load a model here")

    def report(self) -> Any:
        """Return what the runtime says here."""
        return self.runtime.report()
