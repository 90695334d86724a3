"""The keys and values of one sequence: buffers for each layer, which ONNX Runtime reads and writes in place."""

from collections.abc import Sequence
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

    The buffers begin as zeros: a slot that was never written adds nothing to a masked sum. The system gives memory of
    the process page by page as tokens are written; a device gives all at once. What is moved, read or written on a
    device goes by the host.

    Attributes:
        device: ONNX Runtime's name of the memory, or None for that of the process.
    """

    def __init__(self, ort: Any, export: Export, n_ctx: int, device: str | None) -> None:
        """Reserve memory for `n_ctx` tokens (MemoryCapError where there is none)."""
        self.device, self._ort = device, ort
        shape, dtype = (1, export.n_head_kv, n_ctx + SPARE_SLOTS, export.head_dim), KV_DTYPES[export.kv]
        n_own = 1 if device else 2 * export.n_layer
        try:
            self._arrays = [np.zeros(shape, dtype) for _ in range(n_own)]
            made = [self._arrays[i % n_own] for i in range(2 * export.n_layer)]
            self._values = [ort.OrtValue.ortvalue_from_numpy(array, device or "cpu", 0) for array in made]
        except Exception as error:  # ONNX Runtime's exceptions have no common base
            raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error

    def bind(self, binding: Any, *, outputs_only: bool = False) -> None:
        """Bind the buffers as a graph's inputs `past_*` and as its outputs `present_*`."""
        for i, value in enumerate(self._values):
            name = f"{'value' if i % 2 else 'key'}_{i // 2}"
            binding.bind_ortvalue_output(f"present_{name}", value)
            if not outputs_only:
                binding.bind_ortvalue_input(f"past_{name}", value)

    def move(self, slots: NDArray[np.int32], to: int) -> None:
        """Copy the contents of `slots`, int32[n] ascending, to the slots from `to` on."""
        for i in range(len(self._values)):
            array = self._array(i)
            array[:, :, to : to + len(slots)] = array[:, :, slots]
            self._put(i, array)

    def read(self, n_tokens: int) -> list[NDArray[Any]]:
        """Return the first `n_tokens` slots of all buffers: views, or copies of what is on a device."""
        return [self._array(i)[:, :, :n_tokens] for i in range(len(self._values))]

    def write(self, saved: Sequence[NDArray[Any]]) -> None:
        """Write what read() returned to the first slots."""
        for i, part in enumerate(saved):
            array = self._arrays[i] if self.device is None else np.zeros_like(self._arrays[0])
            array[:, :, : part.shape[2]] = part
            self._put(i, array)

    def _array(self, i: int) -> NDArray[Any]:
        if self.device is None:
            return self._arrays[i]
        array = np.empty_like(self._arrays[0])
        self._ort.copy_tensors([self._values[i]], [self._ort.OrtValue.ortvalue_from_numpy(array)])
        return array

    def _put(self, i: int, array: NDArray[Any]) -> None:
        if self.device is not None:
            self._ort.copy_tensors([self._ort.OrtValue.ortvalue_from_numpy(array)], [self._values[i]])

    def close(self) -> None:
        """Free the memory."""
        self._arrays, self._values = [], []


def token_bytes(export: Export) -> int:
    """Return the bytes of the keys and values of one token."""
    return 2 * export.n_layer * export.n_head_kv * export.head_dim * KV_DTYPES[export.kv].itemsize
