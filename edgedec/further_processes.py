"""Processes that belong to a model beside the one that loaded it: what they hold counts as held by that one."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class HasProcesses(Protocol):
    """A model, or what holds models, that has processes of its own on this machine."""

    @property
    def processes(self) -> tuple[int, ...]:
        """The numbers (pid) of the processes that run for it now; none where they have ended."""


def processes_of(*owners: object) -> tuple[int, ...]:
    """Return the processes that belong to models; none for a model that has none."""
    return tuple(pid for owner in owners if isinstance(owner, HasProcesses) for pid in owner.processes)
