"""A model on ONNX Runtime: one opened graph, and forwards that feed it piece by piece."""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import OptionError
from edgedec.logit_ops import NUMPY_ROW_OPS
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.cpu.draft_head.beside import TextBeside
from edgedec_runtimes.onnx.feeds import CHUNK, SPARE_ROWS, Padding, Piece, Zeros, feeds
from edgedec_runtimes.onnx.graph_model import LOGIT_ROWS, GraphModel, Opened, bind_input, bind_output, pieces
from edgedec_runtimes.onnx.kv import KVBuffers
from edgedec_runtimes.onnx.single_steps import one_row_is_exact
from edgedec_runtimes.shared.measured_model import MeasuredModel, MeasuredSession
from edgedec_runtimes.shared.pages import give_back
from edgedec_runtimes.shared.session_state import CheckedItem

_COPIED_BYTES = 1024


class OnnxSession(MeasuredSession):
    """Implements edgedec.model.Session.

    Attributes:
        text: What a draft head knows of the text, or None.
    """

    def __init__(
        self, model: MeasuredModel[Any, Any], buffers: KVBuffers, n_ctx: int, binding: Any, text: TextBeside | None
    ) -> None:
        """Take over buffers, and bind them as inputs and as outputs to a binding of ONNX Runtime."""
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

    The model closes the session with itself. `text` is what a draft head knows of the text; None where none follows it.

    Raises:
        MemoryCapError: The system, or the device, has no memory for the keys and values.
    """
    opened = model.handle
    buffers = KVBuffers(opened.ort, opened.export, n_ctx, opened.kv_device)
    session = OnnxSession(model, buffers, n_ctx, opened.graph.io_binding(), text)
    model.adopt(session)
    return session


_LET_GO_ROWS = 256
"""How many tokens are looked up in the embedding before pages of the weights' file are given back again.

ONNX Runtime copies most matrices into an arrangement of its own, and keeps the file's scales and zero points mapped
without reading them again. Of the embedding it reads a row per token, for which the system maps 64 KiB around the row.
Both would count as memory of the process.
"""

_CAPABILITIES = Capabilities(
    rollback=True,
    trees=True,
    exact_trees=False,
    fork=True,
    layers=True,
    taps=True,
    hidden_input=False,  # the graph has no input for hidden states
    max_rows=LOGIT_ROWS,
    prefill_chunk=CHUNK,
)


class OnnxModel(GraphModel[OnnxSession]):
    """Implements edgedec.model.Model.

    Attributes:
        padding: Which part of the graph sees the row that makes the number of rows even.
    """

    def __init__(
        self,
        opened: Opened,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        logit_rows: int,
        cache_dir: Path | None,
    ) -> None:
        """Take over an opened graph, as GraphModel.

        The memory of `logit_rows` rows of logits is kept between forwards; a forward that returns more allocates it.
        """
        super().__init__(opened, card, _CAPABILITIES, tokenizer, terms, cache_dir)
        self.export = opened.export
        self._logits = np.empty((logit_rows + SPARE_ROWS, card.n_vocab), np.float32)
        self._free_logits = self._logits  # rows that the items of a forward have not taken yet
        self._zeros = Zeros()
        self.padding = Padding.ATTENTION
        self._n_looked_up = 0  # tokens, since pages were let go
        if not one_row_is_exact(self, cache_dir):
            self.padding = Padding.ALL
        give_back(opened.mapped)

    def session(self, n_ctx: int) -> OnnxSession:
        """Open an empty session; the system gives its memory as tokens are written."""
        with self.lock:
            if n_ctx < 1 or n_ctx > 1 << 24:
                raise OptionError("n_ctx", n_ctx, f"a session holds 1 to {1 << 24} tokens")
            head = self.handle.head
            return open_session(self, n_ctx, None if head is None else head.text(n_ctx))

    def _evaluate(self, checked: list[CheckedItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate items one after another, each with its part of one array of logits."""
        n_rows = sum(len(item.logit_rows) for item in checked) + SPARE_ROWS
        self._free_logits = self._logits
        if n_rows > len(self._logits):
            self._free_logits = np.empty((n_rows, self.card.n_vocab), np.float32)
        return super()._evaluate(checked, on_progress)

    def _run(self, item: CheckedItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate an item: a tree at once, a long chain in pieces that end at multiples of CHUNK."""
        state, n_wanted = item.session.state, len(item.logit_rows)
        logits, self._free_logits = self._free_logits, self._free_logits[n_wanted:]
        hidden = {tap: np.empty((item.n_rows, self.card.n_embd), np.float32) for tap in item.taps}
        self.stop.check()
        state.begin(item)
        for begin, end in pieces(item):
            self.stop.check()
            self._run_piece(Piece(item, begin, end), logits, hidden)
            state.advance(end - begin)
            if on_progress is not None and item.n_rows > CHUNK:
                on_progress(Progress("prefill", end, item.n_rows, "tokens"))
        if item.n_rows > CHUNK:
            return_free_memory()
        return Forward(logits[:n_wanted], hidden)

    def _run_piece(self, piece: Piece, logits: NDArray[np.float32], hidden: Mapping[int, NDArray[np.float32]]) -> None:
        """Run the graph once; it writes its outputs to their places."""
        first, text = bisect_left(piece.item.logit_rows, piece.begin), piece.item.session.text
        layers = () if text is None else text.layers
        states = {tap: rows[piece.begin : piece.end] for tap, rows in hidden.items()}
        read = np.empty((len(layers), piece.n_rows, self.card.n_embd), np.float32)  # by the draft head
        places = dict(zip(layers, read, strict=True)) | states
        inputs = feeds(piece, self.export, self._zeros, self.padding, places)
        outputs = {"logits": logits[first : first + len(inputs["logit_rows"])][None]}
        outputs |= {f"hidden_{tap}": rows[None] for tap, rows in places.items()}
        self._run_graph(piece.item.session.bound(inputs, outputs))
        for place, layer in zip(read, layers, strict=True):
            if layer in states:
                place[:] = states[layer]
        if text is not None:
            text.take(
                piece.n_past, piece.tokens, read, n_wanted=len(piece.logit_rows), is_tree=piece.item.parents is not None
            )
        self._n_looked_up += piece.n_rows
        if self._n_looked_up >= _LET_GO_ROWS:
            self._n_looked_up = 0
            give_back(self.handle.mapped)
