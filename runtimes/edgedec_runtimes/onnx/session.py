"""One sequence's KV cache on ONNX Runtime."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from edgedec_runtimes.onnx.kv import KVBuffers
from edgedec_runtimes.shared.own_session import OwnSession

if TYPE_CHECKING:
    from edgedec_runtimes.onnx.model import OnnxModel

_COPIED_BYTES = 1024


class OnnxSession(OwnSession["OnnxModel"]):
    """Implements edgedec.model.Session."""

    def __init__(self, model: "OnnxModel", buffers: KVBuffers, n_ctx: int, binding: Any) -> None:
        """Take over buffers, and a binding of ONNX Runtime that they are bound to: as inputs and as outputs."""
        super().__init__(model, n_ctx)
        self._buffers = buffers
        self._binding: Any = binding
        self._inputs: dict[str, NDArray[Any]] = {}  # what is bound now, as are the outputs
        self._outputs: Mapping[str, NDArray[Any]] = {}
        for name, array in buffers.named():
            _bind_input(binding, f"past_{name}", array)
        self._bind_caches()

    def bound(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Any:
        """Bind a run's inputs and outputs beside the buffers, and return the binding.

        Binding takes longer than copying a few numbers: an input of the shape of the last one goes into its place.
        """
        for name, array in inputs.items():
            place = self._inputs.get(name)
            fits = place is not None and place.shape == array.shape and array.nbytes <= _COPIED_BYTES
            if place is not None and fits and place.flags.writeable:
                place[...] = array
            else:
                self._inputs[name] = array
                _bind_input(self._binding, name, array)
        if self._outputs.keys() - outputs.keys():
            self._binding.clear_binding_outputs()
            self._bind_caches()
        for name, array in outputs.items():
            _bind_output(self._binding, name, array)
        self._outputs = outputs
        return self._binding

    def _bind_caches(self) -> None:
        for name, array in self._buffers.named():
            _bind_output(self._binding, f"present_{name}", array)

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        with self._model.exclusive():
            slots = self.state.leave_tree(rows)
            self._buffers.move(slots, self.n_cached)
            self.state.hold_path(slots)

    def exact_rows(self, n_past: int) -> int | None:
        """Return how many rows may be bit-equal to single steps; see edgedec.model.Session."""
        return self._model.exact.limit(n_past)

    def has_exact_rows(self, n_past: int, n_rows: int) -> bool:
        """Tell whether so many rows are bit-equal to single steps; see edgedec.model.Session."""
        return self._model.exact.holds(self, n_past, n_rows)

    def fork(self) -> "OnnxSession":
        """Open a second session with a copy of the cached prefix."""
        with self._model.exclusive():
            self.state.check_settled("forked")
            twin, n = self._model.session(self.n_ctx), self.n_cached
            for mine, theirs in zip(self._buffers.parts(n), twin._buffers.parts(n), strict=True):
                theirs[:] = mine
            twin.state.restore(n, self.state.written[:, :n])
            return twin

    def save(self) -> bytes:
        """Serialize the cached KV."""
        with self._model.exclusive():
            self.state.check_settled("saved")
            n = self.n_cached
            arrays = (array.tobytes() for array in (*self._buffers.parts(n), self.state.written[:, :n]))
            return self._saved_head(n) + b"".join(arrays)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; on an error the session is as it was."""
        with self._model.exclusive():
            self.state.check_open()
            self._check_saved_tokens(n_tokens)
            arrays = self._buffers.parts(n_tokens)
            n_flags = self._model.card.n_layer * n_tokens
            n_kv = sum(array.nbytes for array in arrays)
            offset = self._saved_body(data, n_tokens, n_kv + n_flags)
            for array in arrays:
                array[:] = np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape)
                offset += array.nbytes
            written = np.frombuffer(data, np.bool_, n_flags, offset).reshape(-1, n_tokens)
            self.state.restore(n_tokens, written)

    def cancel(self) -> None:
        """Stop the forward that is running; without one, nothing happens."""
        self._model.cancel(self)

    def close(self) -> None:
        """Free the KV cache; calling it again does nothing."""
        with self._model.lock:
            self.state.close()
            self._binding = None  # before what it points to
            self._inputs, self._outputs = {}, {}
            self._buffers.close()


def _bind_input(binding: Any, name: str, array: NDArray[Any]) -> None:
    assert array.flags.c_contiguous, name
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _bind_output(binding: Any, name: str, array: NDArray[Any]) -> None:
    assert array.flags.c_contiguous, name
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
