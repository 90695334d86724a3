"""What a device's own account says that a load took, and what of it is the driver's: kept for later plans."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from edgedec.device import Device, DeviceCap
from edgedec.storage import probe_cache

_KIND = "devices"
_MOST_BYTES = 4_000_000_000  # of a driver; more is another process's


def with_measured_drivers(devices: Sequence[Device], runtime: str, cache_dir: Path | None) -> tuple[Device, ...]:
    """Return the devices with what an earlier load has found their drivers to take, where one has."""
    return tuple(_with_measured(device, runtime, cache_dir) for device in devices)


def _with_measured(device: Device, runtime: str, cache_dir: Path | None) -> Device:
    found = probe_cache.get(cache_dir, _KIND, _key(device, runtime))
    if not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= _MOST_BYTES:
        return device
    return replace(device, driver_bytes=found, measured=True)


def with_account(caps: Sequence[DeviceCap], used: Mapping[str, int], after: Sequence[Device]) -> tuple[DeviceCap, ...]:
    """Return the devices of a plan with what the load took on each one that it uses, by the device's account.

    Unified devices are left out: what the system has free changes for many reasons.

    Args:
        caps: The devices as they were before the load.
        used: The planned bytes of the model itself, by the names of the devices that it uses.
        after: The devices after the load.
    """
    free = {device.name: device.free_bytes for device in after}
    return tuple(_accounted(cap, free.get(cap.device.name)) if cap.device.name in used else cap for cap in caps)


def _accounted(cap: DeviceCap, free_bytes: int | None) -> DeviceCap:
    if free_bytes is None or cap.device.unified:
        return cap
    return replace(cap, held_bytes=max(0, cap.device.free_bytes - free_bytes))


def remember_drivers(caps: Sequence[DeviceCap], used: Mapping[str, int], runtime: str, cache_dir: Path | None) -> None:
    """Keep what the drivers took, for later plans: what was held by each device's account, less the model itself.

    Args:
        caps: What with_account returned.
        used: The planned bytes of the model itself, by the names of the devices that it uses.
        runtime: The runtime's name.
        cache_dir: Root of edgedec's cache, or None to keep nothing.
    """
    for cap in caps:
        if cap.held_bytes is None:
            continue
        n_bytes = max(0, cap.held_bytes - used[cap.device.name])
        if n_bytes <= _MOST_BYTES:
            probe_cache.put(cache_dir, _KIND, _key(cap.device, runtime), n_bytes)


def _key(device: Device, runtime: str) -> str:
    return f"{runtime} {device.backend} {device.description} {device.total_bytes}"
