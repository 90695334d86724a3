"""What the models on ONNX Runtime share: one opened graph, whose runs can be stopped."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from numpy.typing import NDArray

from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward, Session
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.cpu.draft_head.beside import HeadBeside
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import CHUNK
from edgedec_runtimes.onnx.library import run_options, translated
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.measured_model import MeasuredModel
from edgedec_runtimes.shared.session_state import CheckedItem

LOGIT_ROWS = 256
"""Most rows of logits of a forward, and most rows of a tree."""

_SHORT = 16  # a chain of so many rows is never cut: batch_invariant is measured up to there


@dataclass(frozen=True, slots=True)
class Opened:
    """A graph that ONNX Runtime has opened.

    Attributes:
        ort: The module onnxruntime.
        graph: Its InferenceSession.
        export: The export that the graph is of.
        mapped: Where ONNX Runtime has mapped the weights' file: addresses and lengths.
        files: The weights' file, watched while it is mapped.
        head: The draft head that follows the texts of all sessions, or None.
        kv_device: Where keys and values lie, by ONNX Runtime's name; None for the memory of the process.
    """

    ort: Any
    graph: Any
    export: Export
    mapped: list[tuple[int, int]]
    files: MappedFiles
    head: HeadBeside | None = None
    kv_device: str | None = None

    def close(self) -> None:
        """Close the file, and free the head; all sessions must be closed."""
        if self.head is not None:
            self.head.close()
        self.files.close()


S = TypeVar("S", bound=Session)
T = TypeVar("T")


class GraphModel(MeasuredModel[Opened, S]):
    """The part of edgedec.model.Model that does not depend on what the graph's inputs are."""

    def __init__(
        self,
        opened: Opened,
        card: ModelCard,
        capabilities: Capabilities,
        tokenizer: Tokenizer,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        cache_dir: Path | None,
    ) -> None:
        """Take over an opened graph, as MeasuredModel."""
        super().__init__(opened, card, capabilities, tokenizer, terms, opened.close, cache_dir, tree_rows=LOGIT_ROWS)
        self._running: Any = None  # ONNX Runtime's options of the run that is going on, or None

    def _evaluate(self, checked: list[CheckedItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate items one after another, in runs of the graph that cancel() stops."""
        outer, self._running = self._running, run_options(self.handle.ort)
        try:
            return super()._evaluate(checked, on_progress)
        finally:
            self._running = outer

    def _run_graph(self, binding: Any) -> None:
        """Run the graph once (raises as _stoppable)."""
        self._stoppable(lambda: self.handle.graph.run_with_iobinding(binding, self._running))

    def _stoppable(self, run: Callable[[], T]) -> T:
        """Return what a run of a graph returns, which takes the options `_running`.

        Raises:
            CancelledError: The forward was cancelled.
            ModelFormatError: The file that the weights are mapped from has changed, or ONNX Runtime's own reason.
        """
        opened = self.handle
        opened.files.check()
        try:
            with translated("a forward"):
                result = run()
        except Exception:
            self.stop.check()  # a run that was stopped raises an error of its own
            raise
        opened.files.check()
        return result

    def cancel(self, session: S) -> None:
        """Stop the forward that the session is in, also in the middle of a run."""
        running = self._running  # read first: options of a run that begins later must not be touched
        super().cancel(session)
        if running is not None and self.stop.flag.value:
            running.terminate = True


def pieces(item: CheckedItem) -> list[tuple[int, int]]:
    """Return the rows [begin, end) of an item that each run of the graph takes.

    Runs end at multiples of CHUNK, so a prefix reused up to such a multiple was cut as a cold start cuts it. A forward
    that verifies a draft is never cut.
    """
    n, n_past = item.n_rows, item.n_past
    if item.parents is not None or n <= _SHORT:
        return [(0, n)]
    borders = range(CHUNK - n_past % CHUNK, n, CHUNK)
    return list(zip([0, *borders], [*borders, n], strict=True))


def bind_input(binding: Any, name: str, array: NDArray[Any]) -> None:
    """Let the graph read an input from an array without gaps."""
    assert array.flags.c_contiguous, name
    binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def bind_output(binding: Any, name: str, array: NDArray[Any]) -> None:
    """Let the graph write an output to an array without gaps."""
    assert array.flags.c_contiguous, name
    binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
