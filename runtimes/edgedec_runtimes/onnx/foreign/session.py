"""One sequence's KV cache: arrays that the graph returned, which nobody writes to again."""

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError
from edgedec_runtimes.onnx.foreign.contract import Contract
from edgedec_runtimes.shared.measured_model import MeasuredModel, MeasuredSession

Arrays = list[NDArray[np.float32]]


class ForeignSession(MeasuredSession):
    """Implements edgedec.model.Session."""

    def __init__(self, model: MeasuredModel[Any, Any], contract: Contract, n_ctx: int) -> None:
        """Begin empty."""
        super().__init__(model, n_ctx)
        self._contract = contract
        self._cached = empty_caches(contract, 0)

    def past(self, n_past: int) -> Arrays:
        """Return the first n_past tokens' keys and values, f32[1, n_head_kv, n_past, head_dim] each.

        The arrays are copied where they hold more tokens, as the graph wants arrays without gaps.
        """
        self._cached = [np.ascontiguousarray(array[:, :, :n_past]) for array in self._cached]
        return self._cached

    def hold(self, arrays: Arrays) -> None:
        """Take over arrays that the graph returned; they may have one slot more than there are tokens."""
        self._cached = arrays

    def _fork(self) -> "ForeignSession":
        """Return a second session with the same arrays: neither writes to them."""
        twin: ForeignSession = self._model.session(self.n_ctx)
        twin.hold(list(self._cached))
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return [array[:, :, :n] for array in self._cached]

    def _layout(self, n: int) -> Sequence[tuple[Any, tuple[int, ...]]]:
        return [(np.float32, (1, self._contract.n_head_kv, n, self._contract.head_dim))] * len(self._contract.caches)

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> Literal[True]:
        self.hold([array.copy() for array in arrays])
        return True

    def _free(self) -> None:
        self._cached = []


def empty_caches(contract: Contract, n_slots: int) -> Arrays:
    """Return arrays for the keys and values of n_slots tokens (MemoryCapError where there is no memory)."""
    try:
        return [np.empty((1, contract.n_head_kv, n_slots, contract.head_dim), np.float32) for _ in contract.caches]
    except MemoryError as error:
        raise MemoryCapError(f"no memory for the keys and values of {n_slots} tokens; ask for fewer") from error
