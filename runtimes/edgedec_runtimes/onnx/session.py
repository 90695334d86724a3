"""One sequence's KV cache on ONNX Runtime."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.onnx.graph_model import bind_input, bind_output
from edgedec_runtimes.onnx.kv import KVBuffers
from edgedec_runtimes.shared.measured_model import MeasuredModel, MeasuredSession

_COPIED_BYTES = 1024


class OnnxSession(MeasuredSession):
    """Implements edgedec.model.Session."""

    def __init__(self, model: MeasuredModel[Any, Any], buffers: KVBuffers, n_ctx: int, binding: Any) -> None:
        """Take over buffers, and bind them as inputs and as outputs to a binding of ONNX Runtime."""
        super().__init__(model, n_ctx)
        self._buffers = buffers
        self._binding: Any = binding
        self._inputs: dict[str, NDArray[Any]] = {}  # the arrays that are bound now
        self._outputs: Mapping[str, NDArray[Any]] = {}
        for name, array in buffers.named():
            bind_input(binding, f"past_{name}", array)
        self._bind_caches()

    def bound(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Any:
        """Bind a run's inputs and outputs beside the buffers, and return the binding.

        Binding takes longer than copying a few numbers: a small input of the same shape as the last one is copied to
        the array that is bound already.
        """
        for name, array in inputs.items():
            place = self._inputs.get(name)
            fits = place is not None and place.shape == array.shape and array.nbytes <= _COPIED_BYTES
            if place is not None and fits and place.flags.writeable:
                place[...] = array
            else:
                self._inputs[name] = array
                bind_input(self._binding, name, array)
        if self._outputs.keys() - outputs.keys():
            self._binding.clear_binding_outputs()
            self._bind_caches()
        for name, array in outputs.items():
            bind_output(self._binding, name, array)
        self._outputs = outputs
        return self._binding

    def _bind_caches(self) -> None:
        for name, array in self._buffers.named():
            bind_output(self._binding, f"present_{name}", array)

    def _move(self, slots: NDArray[np.int32]) -> None:
        self._buffers.move(slots, self.n_cached)

    def _fork(self) -> "OnnxSession":
        """Return a second session with a copy of the cached prefix."""
        twin: OnnxSession = self._model.session(self.n_ctx)
        for mine, theirs in zip(self._buffers.parts(self.n_cached), twin._buffers.parts(self.n_cached), strict=True):
            theirs[:] = mine
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return *self._buffers.parts(n), self.state.written[:, :n]

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> NDArray[np.bool_]:
        *saved, written = arrays
        for array, cached in zip(self._buffers.parts(n), saved, strict=True):
            array[:] = cached
        return written

    def _free(self) -> None:
        self._binding = None  # before what it points to
        self._inputs, self._outputs = {}, {}
        self._buffers.close()
