"""The functions that sampling calls on a row of logits, in native code."""

import ctypes

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import RuntimeUnavailableError
from edgedec.logit_ops import NumpyRowOps, Total
from edgedec_runtimes.cpu.library import check, native


class NativeRowOps(NumpyRowOps):
    """Implements edgedec.logit_ops.LogitOps with the kernels of one instruction set; argmax is numpy's.

    Args:
        instruction_set: The name of the instruction set, or None for the best one.

    Raises:
        RuntimeUnavailableError: This processor or this build does not have the instruction set.
    """

    def __init__(self, instruction_set: bytes | None = None) -> None:
        library = native()
        self._kernels = library.ec_find_kernels(instruction_set)
        if self._kernels is None:
            raise RuntimeUnavailableError(library.ec_last_error().decode())
        self._total = library.ec_row_total
        self._above = library.ec_row_above
        self._top_k = library.ec_row_top_k
        self._nucleus = library.ec_row_nucleus
        self._contenders = library.ec_row_contenders

    def total(self, row: NDArray[np.float32]) -> Total:
        """Return the largest logit, and the softmax's denominator relative to it."""
        most = ctypes.c_float()
        weight = self._total(self._kernels, _row(row), len(row), ctypes.byref(most))
        return Total(most.value, weight)

    def above(self, row: NDArray[np.float32], threshold: float) -> NDArray[np.int64]:
        """Return the tokens whose logit is at least `threshold`."""
        ids = np.empty(len(row), np.int64)
        n = self._above(self._kernels, _row(row), len(row), threshold, ids.ctypes.data, len(ids))
        return ids[:n] if n >= 0 else super().above(row, threshold)

    def top_k(self, row: NDArray[np.float32], k: int) -> NDArray[np.int64]:
        """Return the k most probable tokens."""
        ids = np.empty(k, np.int64)
        check(self._top_k(self._kernels, _row(row), len(row), k, ids.ctypes.data), "the most probable tokens")
        return ids

    def nucleus(self, row: NDArray[np.float32], top_p: float) -> NDArray[np.int64]:
        """Return the tokens of the nucleus of probability `top_p`."""
        ids = np.empty(len(row), np.int64)
        n = self._nucleus(self._kernels, _row(row), len(row), top_p, ids.ctypes.data, len(ids))
        return ids[:n] if n >= 0 else super().nucleus(row, top_p)

    def contenders(self, row: NDArray[np.float32], temperature: float, key: int) -> NDArray[np.int64]:
        """Return a few tokens, among them the one that is drawn at this temperature with this key."""
        ids = np.empty(len(row), np.int64)
        n = self._contenders(self._kernels, _row(row), len(row), temperature, key, ids.ctypes.data, len(ids))
        return ids[:n] if n >= 0 else super().contenders(row, temperature, key)


def _row(row: NDArray[np.float32]) -> int:
    """Return the address of a row, f32[n_vocab] (TypeError for another type or an array with gaps)."""
    if row.dtype != np.float32 or not row.flags.c_contiguous or row.ndim != 1:
        raise TypeError(f"a row of logits is float32 without gaps, found {row.dtype} with strides {row.strides}")
    return row.ctypes.data
