"""How many experts of a layer the rows of forwards went through: by it the cost of a forward grows with its rows."""

import ctypes
from collections.abc import Mapping

import numpy as np

from edgedec_runtimes.cpu.library import KERNEL_ROWS, address, native

_MOST_TOLD = 64  # rows; longer forwards read a prompt


def touched_experts(handle: ctypes.c_void_p) -> dict[int, float]:
    """Return the mean number of different experts of a layer by the number of its rows, over all forwards so far.

    Args:
        handle: The native model; without experts, the result is empty.
    """
    n_layers, n_experts = (np.zeros(KERNEL_ROWS + 1, np.uint64) for _ in range(2))
    native().ec_model_experts(handle, address(n_layers), address(n_experts))
    return {int(n): float(n_experts[n] / n_layers[n]) for n in np.flatnonzero(n_layers)}


def described(touched: Mapping[int, float]) -> list[str]:
    """Return a sentence on the experts that forwards went through, for a person; [] where there are none.

    >>> described({1: 8.0, 4: 27.25, 256: 128.0})
    ['experts of a layer that a forward of n tokens went through, since the model was loaded: 1: 8.0, 4: 27.2']
    """
    known = ", ".join(f"{n}: {mean:.1f}" for n, mean in touched.items() if n <= _MOST_TOLD)
    what = "experts of a layer that a forward of n tokens went through, since the model was loaded"
    return [f"{what}: {known}"] if known else []
