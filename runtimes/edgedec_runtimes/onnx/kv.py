"""The keys and values of one sequence: buffers for each layer, which ONNX Runtime reads and writes in place."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError
from edgedec_runtimes.onnx.exported import Export

SPARE_SLOTS = 1
"""Slots beyond a session's tokens, for the padding row of a forward with an odd number of rows."""

KV_DTYPES: dict[str, np.dtype[Any]] = {"f32": np.dtype(np.float32), "int8": np.dtype(np.int8)}


class KVBuffers:
    """Keys and values, each [1, n_head_kv, n_ctx + SPARE_SLOTS, head_dim] for every layer.

    The buffers begin as zeros: the system gives the memory page by page as tokens are written, and a slot that was
    never written adds nothing to a masked sum.
    """

    def __init__(self, export: Export, n_ctx: int) -> None:
        """Reserve memory for `n_ctx` tokens (MemoryCapError where the system refuses it)."""
        shape = (1, export.n_head_kv, n_ctx + SPARE_SLOTS, export.head_dim)
        dtype = KV_DTYPES[export.kv]
        try:
            self.arrays = [np.zeros(shape, dtype) for _ in range(2 * export.n_layer)]
        except MemoryError as error:
            raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error

    def named(self) -> Iterator[tuple[str, NDArray[Any]]]:
        """Yield each buffer with its name in the graph, after "past_" or "present_"."""
        for i, array in enumerate(self.arrays):
            yield f"{'value' if i % 2 else 'key'}_{i // 2}", array

    def move(self, slots: NDArray[np.int32], to: int) -> None:
        """Copy the contents of `slots`, int32[n] ascending, to the slots from `to` on."""
        for array in self.arrays:
            array[:, :, to : to + len(slots)] = array[:, :, slots]

    def parts(self, n_tokens: int) -> list[NDArray[Any]]:
        """Return views of the first `n_tokens` slots of all buffers."""
        return [array[:, :, :n_tokens] for array in self.arrays]

    def close(self) -> None:
        """Free the memory."""
        self.arrays = []


def token_bytes(export: Export) -> int:
    """Return the bytes of the keys and values of one token."""
    return 2 * export.n_layer * export.n_head_kv * export.head_dim * KV_DTYPES[export.kv].itemsize
