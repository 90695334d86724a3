"""What a device's own account says that a load took, and what of it is the driver's: kept for later plans."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from edgedec.memory_plan import DRIVER, Device, DeviceCap, MemoryPlan
from edgedec.storage import probe_cache

_KIND = "devices"
_MOST_BYTES = 4_000_000_000  # of a driver; more is another process's


def with_measured_drivers(devices: Sequence[Device], runtime: str, cache_dir: Path | None) -> tuple[Device, ...]:
    """Return the devices with what an earlier load has found their drivers to take, where one has."""
    return tuple(_with_measured(device, runtime, cache_dir) for device in devices)


def _with_measured(device: Device, runtime: str, cache_dir: Path | None) -> Device:
    measured = probe_cache.get(cache_dir, _KIND, _key(device, runtime))
    if not isinstance(measured, int) or isinstance(measured, bool) or not 0 <= measured <= _MOST_BYTES:
        return device
    return replace(device, driver_bytes=measured, measured=True)


def with_account(plan: MemoryPlan, after: Sequence[Device]) -> MemoryPlan:
    """Return the plan with what the load took on each device that it uses, by the device's account.

    Unified devices are left out: what the system has free changes for many reasons.

    Args:
        plan: The plan, which has the devices as they were before the load.
        after: The devices after it.
    """
    free = {device.name: device.free_bytes for device in after}
    return replace(plan, devices=tuple(_accounted(plan, cap, free.get(cap.device.name)) for cap in plan.devices))


def _accounted(plan: MemoryPlan, cap: DeviceCap, free_bytes: int | None) -> DeviceCap:
    if free_bytes is None or cap.device.unified or not plan.device_bytes(cap.device.name):
        return cap
    return replace(cap, held_bytes=max(0, cap.device.free_bytes - free_bytes))


def remember_drivers(plan: MemoryPlan, runtime: str, cache_dir: Path | None) -> None:
    """Keep what the drivers took, for later plans: what was held by each device's account, less the model's terms."""
    for cap in plan.devices:
        if cap.held_bytes is None:
            continue
        name = cap.device.name
        planned = sum(term.n_bytes for term in plan.terms if term.device == name and term.name != DRIVER)
        n_bytes = max(0, cap.held_bytes - planned)
        if n_bytes <= _MOST_BYTES:
            probe_cache.put(cache_dir, _KIND, _key(cap.device, runtime), n_bytes)


def _key(device: Device, runtime: str) -> str:
    return f"{runtime} {device.backend} {device.description} {device.total_bytes}"
