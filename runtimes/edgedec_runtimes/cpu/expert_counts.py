"""What is counted of experts: how many of a layer forwards went through, and how many of them were in memory."""

import ctypes
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from edgedec_runtimes.cpu.library import address, native

_MOST_TOLD = 64  # rows; longer forwards read a prompt


def touched_experts(handle: ctypes.c_void_p, n_rows: int) -> dict[int, float]:
    """Return the mean number of different experts of a layer by the number of its rows, over all forwards so far.

    Args:
        handle: The native model; without experts, the result is empty.
        n_rows: Most rows of its forwards.
    """
    n_layers, n_experts = (np.zeros(n_rows + 1, np.uint64) for _ in range(2))
    native().ec_model_experts(handle, address(n_layers), address(n_experts))
    return {int(n): float(n_experts[n] / n_layers[n]) for n in np.flatnonzero(n_layers)}


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """How often experts of a model were wanted that reads them from a file, and where they were then.

    Attributes:
        n_chosen: Experts that the rows of layers chose, those of a layer counted once a forward.
        present: Experts that were in memory when they were chosen; the other chosen experts were read.
    """

    n_chosen: int
    present: int

    def described(self) -> list[str]:
        """Return a sentence for a person; [] where nothing was read from a file.

        >>> ExpertReads(960, 720).described()
        ['of the experts that forwards needed, 75% were in memory; the others were read from the disk']
        """
        if not self.n_chosen:
            return []
        there = f"{self.present / self.n_chosen:.0%} were in memory"
        return [f"of the experts that forwards needed, {there}; the others were read from the disk"]


def expert_reads(handle: ctypes.c_void_p) -> ExpertReads:
    """Return the counts of all forwards so far; all are 0 where the experts stay in memory."""
    counts = np.zeros(2, np.uint64)
    native().ec_model_expert_reads(handle, address(counts))
    return ExpertReads(*(int(count) for count in counts))


def described(touched: Mapping[int, float]) -> list[str]:
    """Return a sentence on the experts that forwards went through, for a person; [] where there are none.

    >>> described({1: 8.0, 4: 27.25, 256: 128.0})
    ['experts of a layer that a forward of n tokens went through, since the model was loaded: 1: 8.0, 4: 27.2']
    """
    shown = ", ".join(f"{n}: {mean:.1f}" for n, mean in touched.items() if n <= _MOST_TOLD)
    what = "experts of a layer that a forward of n tokens went through, since the model was loaded"
    return [f"{what}: {shown}"] if shown else []
