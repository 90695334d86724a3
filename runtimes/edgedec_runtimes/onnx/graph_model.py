"""What models on ONNX Runtime share: one opened graph, whose runs can be stopped, and sessions that end with it."""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from edgedec.errors import SessionError
from edgedec.memory import MemoryTerm
from edgedec.model import Forward, ForwardItem, ModelCard, Session
from edgedec.progress import OnProgress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.bookkeeping import Checked, ModelLock, Shape, Stop
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import CHUNK
from edgedec_runtimes.onnx.library import run_options, translated

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
    """

    ort: Any
    graph: Any
    export: Export
    mapped: list[tuple[int, int]]


S = TypeVar("S", bound=Session)


class GraphModel(Generic[S]):
    """The part of edgedec.model.Model that does not depend on what the graph's inputs are.

    Attributes:
        lock: Held by whatever touches the graph and its sessions; see exclusive().
        stop: What cancels a forward.
    """

    def __init__(
        self,
        opened: Opened,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        cache_dir: Path | None,
    ) -> None:
        """Take over an opened graph.

        Args:
            opened: The graph.
            tokenizer: The vocabulary.
            card: The facts.
            terms: Makes the memory plan for a context and a number of rows.
            cache_dir: Where the answer to `batch_invariant` is remembered, or None.
        """
        self._opened: Opened | None = opened
        self._tokenizer = tokenizer
        self._card = card
        self._terms = terms
        self._cache_dir = cache_dir
        self._invariant: int | None = None
        self._shape = Shape(card.n_vocab, card.n_embd, card.n_layer, MAX_ROWS)
        self._running: Any = None  # the options of the run that is going on
        self.lock = ModelLock()
        self.stop = Stop()
        self._sessions: weakref.WeakSet[S] = weakref.WeakSet()

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""
        return self._card

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the export."""
        return self._tokenizer

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return self._terms(n_ctx, n_rows)

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions, one after another."""
        return self.forward_with_progress(items, None)

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        raise NotImplementedError

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
        """Run the graph once (CancelledError where it was stopped)."""
        try:
            with translated("a forward"):
                opened.graph.run_with_iobinding(binding, self._running)
        except Exception:
            self.stop.check()  # what was cancelled says so
            raise

    def cancel(self, session: S) -> None:
        """Stop the forward that the session is in, also in the middle of a run."""
        running = self._running  # read first: options of a run that begins later must not be touched
        self.stop.cancel(session)
        if running is not None and self.stop.flag.value:
            running.terminate = True

    @contextmanager
    def exclusive(self) -> Iterator[Opened]:
        """Let nobody else use the graph and its sessions.

        Raises:
            SessionError: The model is closed, or of the process that this one is a fork of.
        """
        with self.lock:
            self.lock.check_process()
            if self._opened is None:
                raise SessionError("the model is closed; load it again")
            yield self._opened

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing, nor does it in a forked child.

        There the graph's threads are missing, for which freeing it would wait.
        """
        if not self.lock.is_ours:
            return
        with self.lock:
            for session in list(self._sessions):
                session.close()
            self._opened = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
