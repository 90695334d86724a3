"""How layers are split among devices under the caps of a plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgedec.errors import counted
from edgedec.load_options import LoadOptions
from edgedec.memory.setting import Setting
from edgedec.memory_plan import DRIVER, Device, DeviceCap, HasDevices, MemoryTerm, Split

_USABLE = 0.9  # of what a device has free


def device_caps(devices: Sequence[Device], gpu_bytes: int | None, held: int = 0) -> tuple[DeviceCap, ...]:
    """Return how much of each device may be held: of what is free nine tenths, and at most what the user allows.

    Args:
        devices: The devices.
        gpu_bytes: The most bytes on each device, or None for no limit.
        held: Bytes of other models that count against `gpu_bytes`.
    """
    caps = []
    for device in devices:
        free = int(device.free_bytes * _USABLE)
        allowed = free + 1 if gpu_bytes is None else max(0, gpu_bytes - held)
        caps.append(DeviceCap(device, min(free, allowed), "allowed" if allowed <= free else "free"))
    return tuple(caps)


def with_split(
    setting: Setting,
    caps: Sequence[DeviceCap],
    n_layers: int,
    runtime: HasDevices,
    terms_of: Callable[[LoadOptions], Sequence[MemoryTerm]],
) -> Setting:
    """Return the setting with its layers split: all that are wished for on devices, or as many as fit.

    Args:
        setting: The setting.
        caps: How much of each device may be held.
        n_layers: All layers of the model, the output matrix among them.
        runtime: Decides which device takes how many.
        terms_of: Returns the terms of the models under options; those without a device are the host's.
    """
    options = setting.options
    limits = {cap.device.name: cap.cap_bytes for cap in caps}

    def is_over(split: Split, name: str) -> bool:
        terms = terms_of(replace(options, layer_split=split))
        return sum(term.n_bytes for term in terms if term.device == name) > limits[name]

    n_wanted = n_layers if options.n_gpu_layers in (None, -1) else min(options.n_gpu_layers or 0, n_layers)
    split = runtime.split([*limits], n_wanted, is_over, whole=not setting.fewer_layers)
    setting = replace(setting, options=replace(options, layer_split=split))
    if not setting.fewer_layers:  # a number of layers that was asked for gives nothing up
        return setting
    where = " and ".join(f"{n} on {name}" for name, n in split) or "none on a GPU"
    return replace(setting, given_up={**setting.given_up, "layers": f"of {counted(n_layers, 'layer')} {where}"})


def driver_terms(terms: Sequence[MemoryTerm], caps: Sequence[DeviceCap]) -> list[MemoryTerm]:
    """Return the terms of drivers and libraries on the devices that hold something."""
    used = {term.device for term in terms}
    return [
        MemoryTerm(
            DRIVER,
            device.driver_bytes,
            "measured" if device.measured else "until a load has measured it",
            device=device.name,
        )
        for device in (cap.device for cap in caps)
        if device.name in used and device.driver_bytes
    ]
