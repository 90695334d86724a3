"""How many layers each device takes: as many as its memory allows, the last layers on the devices that are nearest.

Devices take layers in one order, with the host's first (LoadOptions.layer_split). They are filled from the last one on,
which has the output matrix: devices of other machines come first in that order, and so get what the others can't take.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from edgedec.load_options import LoadOptions
from edgedec.loading.runtime_choice import Choice
from edgedec.memory.device_account import with_measured_drivers
from edgedec.memory.ladder import Setting, with_layers
from edgedec.memory_plan import DRIVER, Device, DeviceCap, MemoryTerm, Split, devices_of, n_split

IsOver = Callable[[Split, str], bool]
"""Tells for a split whether a device, by its name, would hold more than its cap."""

_USABLE = 0.9  # of what a device has free


def devices_for(choice: Choice, wishes: Setting) -> tuple[Device, ...]:
    """Return the devices that layers may be put on; none where no layers are wanted there.

    Raises:
        EdgedecError: As HasDevices.devices.
    """
    options, runtime = wishes.options, choice.runtime
    found = () if options.n_gpu_layers == 0 else devices_of(runtime, options)
    return with_measured_drivers(found, runtime.name, options.cache_dir)


def are_ample(devices: Sequence[Device], n_bytes: float) -> bool:
    """Return whether a model that needs at most `n_bytes` fits into the one device; also where there is no device."""
    return not devices or (len(devices) == 1 and devices[0].free_bytes >= n_bytes)


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


def split_layers(names: Sequence[str], n_layers: int, is_over: IsOver) -> Split:
    """Return the split that puts the most layers on devices, at most `n_layers`, with none of them over its cap.

    Args:
        names: The devices in the order of the layers.
        n_layers: Layers that are wanted on devices.
        is_over: Tells whether a device is over its cap. More layers never take less.
    """
    counts = dict.fromkeys(names, 0)

    def split() -> Split:
        return tuple((name, counts[name]) for name in names if counts[name])

    for name in reversed(names):
        least = most = n_layers - sum(counts.values())
        counts[name] = most
        if most and is_over(split(), name):  # mostly all fit
            least, most = 0, most - 1
        while least < most:
            counts[name] = (least + most + 1) // 2
            if is_over(split(), name):
                most = counts[name] - 1
            else:
                least = counts[name]
        counts[name] = least
    # A device that was filled later may have made another one hold more, such as copies of inputs.
    while over := next((name for name, _ in split() if is_over(split(), name)), None):
        counts[over] -= 1
    return split()


def whole_split(names: Sequence[str], n_layers: int, is_over: IsOver) -> Split:
    """Return a split of exactly `n_layers` layers: as split_layers, with what is left over on the first device."""
    found = dict(split_layers(names, n_layers, is_over))
    found[names[0]] = found.get(names[0], 0) + n_layers - n_split(tuple(found.items()))
    return tuple((name, found[name]) for name in names if found.get(name))


def with_split(
    setting: Setting, caps: Sequence[DeviceCap], n_layers: int, terms_of: Callable[[LoadOptions], Sequence[MemoryTerm]]
) -> Setting:
    """Return the setting with its `n_layers` layers split: all that are wished for on devices, or as many as fit.

    `terms_of` returns the terms of the models under options; those without a device are the host's.
    """
    options = setting.options
    limits = {cap.device.name: cap.cap_bytes for cap in caps}

    def is_over(split: Split, name: str) -> bool:
        terms = terms_of(replace(options, layer_split=split))
        return sum(term.n_bytes for term in terms if term.device == name) > limits[name]

    n_wanted = n_layers if options.n_gpu_layers in (None, -1) else min(options.n_gpu_layers or 0, n_layers)
    distribute = split_layers if setting.fewer_layers else whole_split
    return with_layers(setting, distribute([*limits], n_wanted, is_over), n_layers)


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
