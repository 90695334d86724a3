"""What models on ONNX Runtime share: one opened graph, whose runs can be stopped, and sessions that end with it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgedec.memory_plan import MemoryTerm
from edgedec.model import ModelCard, Session
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import CHUNK
from edgedec_runtimes.onnx.library import run_options, translated
from edgedec_runtimes.shared.bookkeeping import Checked
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.mapped_files import MappedFiles

MAX_ROWS = 256
"""Most rows of logits of a forward, and of a tree."""

_SHORT = 16  # rows of a chain that is never cut: as far as batch_invariant is measured


@dataclass(frozen=True, slots=True)
class Opened:
    """A graph that ONNX Runtime has opened.

    Attributes:
        ort: The module onnxruntime.
        graph: Its InferenceSession.
        export: What it was opened from.
        mapped: Its mappings of the weights' file.
        files: That file, watched while it is mapped.
    """

    ort: Any
    graph: Any
    export: Export
    mapped: list[tuple[int, int]]
    files: MappedFiles


S = TypeVar("S", bound=Session)


class GraphModel(LibraryModel[Opened, S]):
    """The part of edgedec.model.Model that does not depend on what the graph's inputs are."""

    def __init__(
        self,
        opened: Opened,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        cache_dir: Path | None,
    ) -> None:
        """Take over an opened graph, as LibraryModel; what is found of its rows is kept in cache_dir, if given."""
        super().__init__(opened, tokenizer, card, terms, MAX_ROWS)
        self._cache_dir = cache_dir
        self._invariant: int | None = None
        self._running: Any = None  # the options of the run that is going on

    @contextmanager
    def _stoppable(self, opened: Opened, sessions: Sequence[S]) -> Iterator[None]:
        """Let cancel() stop the runs of these sessions' forward."""
        with self.stop.running(sessions):
            outer, self._running = self._running, run_options(opened.ort)
            try:
                yield
            finally:
                self._running = outer

    def _run_graph(self, opened: Opened, binding: Any) -> None:
        """Run the graph once (CancelledError where it was stopped, ModelFormatError where its mapped file changed)."""
        opened.files.check()
        try:
            with translated("a forward"):
                opened.graph.run_with_iobinding(binding, self._running)
        except Exception:
            self.stop.check()  # what was cancelled says so
            raise
        opened.files.check()

    def _free(self, held: Opened) -> None:
        held.files.close()

    def cancel(self, session: S) -> None:
        """Stop the forward that the session is in, also in the middle of a run."""
        running = self._running  # read first: options of a run that begins later must not be touched
        self.stop.cancel(session)
        if running is not None and self.stop.flag.value:
            running.terminate = True

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing, nor does it in a forked child.

        There the graph's threads are missing, for which freeing it would wait.
        """
        if self.lock.is_ours:
            super().close()


def pieces(checked: Checked) -> list[tuple[int, int]]:
    """Return the rows [begin, end) of each run of the graph.

    A prefix reused up to a multiple of CHUNK was cut as a cold start would cut it; what a draft is verified with is
    never cut.
    """
    n, n_past = checked.n_rows, checked.n_past
    if checked.parents is not None or n <= _SHORT:
        return [(0, n)]
    borders = range(CHUNK - n_past % CHUNK, n, CHUNK)
    return list(zip([0, *borders], [*borders, n], strict=True))
