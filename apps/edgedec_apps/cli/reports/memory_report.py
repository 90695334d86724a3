"""A memory plan as JSON and as text, with the memory that the process held."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgedec.memory_plan import DeviceCap, MemoryPlan, format_bytes

if TYPE_CHECKING:
    pass


def plan_document(plan: MemoryPlan) -> dict[str, Any]:
    """Return the JSON object of a plan."""
    return {
        "fits": plan.fits,
        "partial": plan.partial,
        "cap_bytes": plan.cap_bytes,
        "cap_name": plan.cap_name,
        "total_bytes": plan.total_bytes,
        "start_bytes": plan.start_bytes,
        "terms": [
            {
                "name": term.name,
                "n_bytes": term.n_bytes,
                "detail": term.detail,
                "grows": term.grows,
                "device": term.device,
            }
            for term in plan.terms
        ],
        "devices": [_device_document(plan, cap) for cap in plan.devices],
        "given_up": list(plan.given_up),
    }


def _device_document(plan: MemoryPlan, cap: DeviceCap) -> dict[str, Any]:
    device = cap.device
    return {
        "name": device.name,
        "backend": device.backend,
        "description": device.description,
        "unified": device.unified,
        "memory_bytes": device.total_bytes,
        "free_bytes": device.free_bytes,
        "cap_bytes": cap.cap_bytes,
        "cap_name": cap.cap_name,
        "total_bytes": plan.device_bytes(device.name),
        "held_bytes": cap.held_bytes,
    }


@dataclass(frozen=True, slots=True)
class Held:
    """The memory plan of a run, and the most bytes that were held so far; None where the system does not say."""

    plan: MemoryPlan
    peak_bytes: int | None


def held_document(held: Held) -> dict[str, Any]:
    """Return the JSON object of the plan, where it has terms, and of the most bytes that were held."""
    return (plan_document(held.plan) if held.plan.terms else {}) | {"peak_bytes": held.peak_bytes}


def held_line(report: Held) -> str:
    """Return a line on the memory that was planned and held, for a person."""
    plan, peak = report.plan, report.peak_bytes
    held = "unknown" if peak is None else format_bytes(peak)
    if not plan.terms:
        return f"memory held at the peak: {held}"
    cap = "" if plan.cap_bytes is None else f", {plan.cap_name}: {format_bytes(plan.cap_bytes)}"
    line = f"memory held at the peak: {held}; planned: {planned_range(plan)}{cap}"
    return "; ".join([line, *(_device_line(plan, one) for one in plan.devices if plan.device_bytes(one.device.name))])


def _device_line(plan: MemoryPlan, cap: DeviceCap) -> str:
    held = "" if cap.held_bytes is None else f"{format_bytes(cap.held_bytes)}, "
    planned = format_bytes(plan.device_bytes(cap.device.name))
    return f"on {cap.device.name}: {held}planned: {planned}, {cap.cap_name}: {format_bytes(cap.cap_bytes)}"


def planned_range(plan: MemoryPlan) -> str:
    """Return the bytes that are held with a short text and at the most, for a person."""
    most = format_bytes(plan.total_bytes)
    if plan.start_bytes == plan.total_bytes:
        return most
    return f"{format_bytes(plan.start_bytes)} with a short text, {most} with a full context"
