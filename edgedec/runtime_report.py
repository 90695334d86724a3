"""What `edgedec doctor` shows of a runtime."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """What `edgedec doctor` shows of a runtime: its version, its devices, and notes for a person."""

    version: str
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
