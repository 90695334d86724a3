"""What runs models: the contract of a runtime, and what it may tell of itself and of the models that it has loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from edgedec.load_options import LoadOptions
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Model


@dataclass(frozen=True, slots=True)
class RuntimeReport:
    """What `edgedec doctor` shows of a runtime: its version, its devices, and notes for a person."""

    version: str
    devices: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Runtime(Protocol):
    """What an entry point of `edgedec.runtimes` names: a class that is called without arguments, or an object.

    A runtime that puts layers on devices has a method `devices` (edgedec.memory_plan.HasDevices), and its terms say on
    which device they lie (MemoryTerm.device) where LoadOptions.layer_split is given.
    """

    name: str

    def accepts(self, path: Path) -> str | None:
        """Return None when this runtime runs the model, else the reason why it does not; reads only the header."""

    def plan(self, path: Path, options: LoadOptions) -> tuple[MemoryTerm, ...]:
        """Return the terms of the memory plan before anything sizeable is loaded."""

    def load(self, path: Path, options: LoadOptions) -> Model:
        """Load the weights.

        Raises:
            ModelError, RuntimeUnavailableError, MemoryCapError: The file, the runtime or the memory can't be used.
            CancelledError: options.cancel was set.
        """

    def report(self) -> RuntimeReport:
        """Return what this machine has of the runtime (RuntimeUnavailableError where the runtime does not work)."""


@runtime_checkable
class TakesHeads(Protocol):
    """A runtime that honours LoadOptions.draft_head; no head is looked for with any other one."""

    def draft_head_kinds(self, path: Path) -> tuple[str, ...]:
        """Return the kinds of heads (edgedec.head_kinds) that it takes for a model."""


@runtime_checkable
class HasKernels(Protocol):
    """A runtime that knows whether another one can be faster on this processor, so that nobody has to measure it."""

    @property
    def is_fastest(self) -> bool:
        """Whether no runtime without a GPU was faster where the kernels of this processor were measured."""


@runtime_checkable
class HasProcesses(Protocol):
    """A model, or what holds models, that has processes of its own on this machine."""

    @property
    def processes(self) -> tuple[int, ...]:
        """The numbers (pid) of the processes that run for it now; none where they have ended."""


def processes_of(*owners: object) -> tuple[int, ...]:
    """Return the processes that belong to models; none for a model that has none."""
    return tuple(pid for owner in owners if isinstance(owner, HasProcesses) for pid in owner.processes)
