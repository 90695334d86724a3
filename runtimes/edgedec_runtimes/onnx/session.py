"""One sequence's KV cache on ONNX Runtime."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec_runtimes.cpu.draft_head.beside import TextBeside
from edgedec_runtimes.onnx.graph_model import bind_input, bind_output
from edgedec_runtimes.onnx.kv import KVBuffers
from edgedec_runtimes.shared.measured_model import MeasuredModel, MeasuredSession

_COPIED_BYTES = 1024


class OnnxSession(MeasuredSession):
    """Implements edgedec.model.Session.

    Attributes:
        text: What a draft head knows of the text, or None.
    """

    def __init__(
        self, model: MeasuredModel[Any, Any], buffers: KVBuffers, n_ctx: int, binding: Any, text: TextBeside | None
    ) -> None:
        """Take over buffers, and bind them as inputs and as outputs to a binding of ONNX Runtime.

        Args:
            model: The model.
            buffers: The keys and values.
            n_ctx: Most tokens.
            binding: The binding.
            text: What a draft head knows of the text; None where no head follows it.
        """
        super().__init__(model, n_ctx)
        self.text = text
        if text is not None:
            self.follower = text.state(self.using, NUMPY_ROW_OPS)
        self._buffers = buffers
        self._binding: Any = binding
        self._inputs: dict[str, NDArray[Any]] = {}  # the arrays that are bound now
        self._outputs: Mapping[str, NDArray[Any]] = {}
        buffers.bind(binding)

    def bound(self, inputs: Mapping[str, NDArray[Any]], outputs: Mapping[str, NDArray[Any]]) -> Any:
        """Bind a run's inputs and outputs beside the buffers, and return the binding.

        Binding takes longer than copying a few numbers: a small input of the same shape as the last one is copied to
        the array that is bound already. On a GPU that would come too late, as binding copies an input to the GPU.
        """
        for name, array in inputs.items():
            place = self._inputs.get(name)
            fits = place is not None and place.shape == array.shape and array.nbytes <= _COPIED_BYTES
            if place is not None and fits and place.flags.writeable and self._buffers.device is None:
                place[...] = array
            else:
                self._inputs[name] = array
                bind_input(self._binding, name, array)
        if self._outputs.keys() - outputs.keys():
            self._binding.clear_binding_outputs()
            self._buffers.bind(self._binding, outputs_only=True)
        for name, array in outputs.items():
            bind_output(self._binding, name, array)
        self._outputs = outputs
        return self._binding

    def _move(self, slots: NDArray[np.int32]) -> None:
        self._buffers.move(slots, self.n_cached)
        if self.text is not None:
            self.text.move(slots, self.n_cached)

    def _fork(self) -> "OnnxSession":
        """Return a second session with a copy of the cached prefix."""
        text = None if self.text is None else self.text.fork(self.n_cached)
        twin = open_session(self._model, self.n_ctx, text)
        twin._buffers.write(self._buffers.read(self.n_cached))
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return *self._buffers.read(n), self.state.written[:, :n]

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> NDArray[np.bool_]:
        *saved, written = arrays
        self._buffers.write(saved)
        return written

    def _free(self) -> None:
        self._binding = None  # before what it points to
        self._inputs, self._outputs = {}, {}
        if self.text is not None:
            self.text.close()
        self._buffers.close()


def open_session(model: MeasuredModel[Any, Any], n_ctx: int, text: TextBeside | None) -> OnnxSession:
    """Return an empty session of a model of an Opened graph; hold the model's lock.

    Args:
        model: The model, which closes the session with itself.
        n_ctx: Most tokens.
        text: What a draft head knows of the text; None where no head follows it.

    Raises:
        MemoryCapError: The system, or the device, has no memory for the keys and values.
    """
    opened = model.handle
    buffers = KVBuffers(opened.ort, opened.export, n_ctx, opened.kv_device)
    session = OnnxSession(model, buffers, n_ctx, opened.graph.io_binding(), text)
    model.adopt(session)
    return session
