"""What the reference runtime keeps of a text: keys, values, columns of convolutions and recurrent states."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.architectures.architecture import Recurrence
from edgedec_runtimes.shared.hyperparameters import CONVOLUTION, Hyperparameters


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values by layer and slot.

    Attributes:
        keys, values: f16 or f32[n_layer, n_ctx, n_kv] with the largest n_kv; keys are rotated to their position.
        columns: f32[n_layer, n_ctx, n_column], what convolutions go over; f32[0, n_ctx, 0] where there are none.
        states: f32[n_layer, n_ctx, n_head, n_key, n_value], the recurrent states behind a slot's row; f32[0, n_ctx, 0,
            0, 0] where there are none.
    """

    keys: NDArray[np.floating]
    values: NDArray[np.floating]
    columns: NDArray[np.float32]
    states: NDArray[np.float32]

    @classmethod
    def empty(
        cls, hyper: Hyperparameters, recurrence: Recurrence | None, n_ctx: int, dtype: np.dtype[np.floating]
    ) -> "KVCache":
        """Return a cache of `n_ctx` slots, all zero."""
        n, r = hyper.n_layer, recurrence
        shape = (n, n_ctx, max(layer.n_kv for layer in hyper.layers))
        columns = (n, n_ctx, hyper.n_embd) if hyper.n_with(CONVOLUTION) else (0, n_ctx, 0)
        states = (0, n_ctx, 0, 0, 0)
        if r is not None:
            columns, states = (n, n_ctx, r.n_column), (n, n_ctx, r.n_head, r.n_key, r.n_value)
        return cls(
            np.zeros(shape, dtype), np.zeros(shape, dtype), np.zeros(columns, np.float32), np.zeros(states, np.float32)
        )

    def arrays(self) -> tuple[NDArray[np.floating], ...]:
        """Return the keys, the values, the columns and the states."""
        return self.keys, self.values, self.columns, self.states

    def move(self, source: NDArray[np.int32], start: int) -> None:
        """Copy the slots `source` to the slots from `start` on."""
        for array in self.arrays():
            array[:, start : start + len(source)] = array[:, source]
