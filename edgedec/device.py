"""A device that layers of a model can be put on, and how layers are split among the host and its devices."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from edgedec.load_options import LoadOptions

HOST = "host"
"""The column of a memory plan for the memory that the CPU uses."""

Split = tuple[tuple[str, int], ...]
"""How many layers each device takes (LoadOptions.layer_split)."""

IsOver = Callable[[Split, str], bool]
"""Tells for a split whether a device, by its name, would hold more than its cap."""


@dataclass(frozen=True, slots=True)
class Device:
    """A device beside the CPU, with memory of its own or with a share of the host's.

    Attributes:
        name: The name that the runtime gives it, such as "CUDA0"; no two devices of a runtime have the same.
        backend: The kind of the device: "CUDA", "Vulkan", "Metal", "RPC", ...
        total_bytes: All of its memory.
        free_bytes: What can still be taken. Where the memory is unified, the host's free memory counts instead.
        unified: Whether it uses the host's memory (Jetson, Apple, integrated GPUs). Its terms are then the host's.
        driver_bytes: What driver and library take there for a model, beside the model's tensors.
        measured: Whether `driver_bytes` was found by the device's own account of an earlier load.
        description: The device's full name, for a person.
    """

    name: str
    backend: str
    total_bytes: int
    free_bytes: int
    unified: bool = False
    driver_bytes: int = 0
    measured: bool = False
    description: str = ""


@dataclass(frozen=True, slots=True)
class DeviceCap:
    """How much of a device's memory a model may take.

    Attributes:
        device: The device.
        cap_bytes: The most bytes.
        cap_name: Where the cap comes from: "allowed" by the user, or "free" on the device.
        held_bytes: What the load took there by the device's own account; None before it, and where that is unknown.
    """

    device: Device
    cap_bytes: int
    cap_name: str = "free"
    held_bytes: int | None = None


@runtime_checkable
class HasDevices(Protocol):
    """A runtime that puts layers on devices, and honours LoadOptions.layer_split."""

    def devices(self, options: LoadOptions) -> tuple[Device, ...]:
        """Return the devices for layers under these options, in the order in which they take layers; no CPU.

        LoadOptions.device names the only one that is wanted. What their drivers take is that of earlier loads, where
        the runtime has kept it (edgedec_runtimes.shared.device_account).

        Raises:
            EdgedecError: The runtime does not work, there is no device of that name, or another machine does not
                answer.
        """

    def split(self, names: Sequence[str], n_layers: int, is_over: IsOver, *, whole: bool) -> Split:
        """Return how many layers each device takes (edgedec_runtimes.shared.layer_split fills the nearest ones first).

        Args:
            names: The devices in the order of the layers.
            n_layers: Layers that are wanted on devices: all of them where `whole`, else as many as fit.
            is_over: Tells whether a device is over its cap.
            whole: Whether no layer may be left over.
        """

    def account(
        self, caps: tuple[DeviceCap, ...], used: Mapping[str, int], options: LoadOptions
    ) -> tuple[DeviceCap, ...]:
        """Return the devices of a plan, after a load, with what they took by their own account.

        Args:
            caps: The devices as they were before the load.
            used: The planned bytes of the models themselves, by the names of the devices that they use.
            options: The options that the model was loaded with.
        """


def devices_of(runtime: object, options: LoadOptions) -> tuple[Device, ...]:
    """Return a runtime's devices under these options (raises as HasDevices.devices); none where it has none."""
    return runtime.devices(options) if isinstance(runtime, HasDevices) else ()


def n_split(split: Split) -> int:
    """Return how many layers a split puts on devices.

    >>> n_split((("RPC0", 4), ("CUDA0", 20)))
    24
    """
    return sum(n_layers for _, n_layers in split)
