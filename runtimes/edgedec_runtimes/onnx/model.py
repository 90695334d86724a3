"""A model on ONNX Runtime: one opened graph, and forwards that feed it piece by piece."""

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, MemoryCapError, RequestError, SessionError
from edgedec.memory import MemoryTerm
from edgedec.model import Capabilities, Forward, ForwardItem, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.system_memory import return_free_memory
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.bookkeeping import Checked, ModelLock, Shape, Stop, check_items
from edgedec_runtimes.invariance import measured_invariance
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import CHUNK, SPARE_ROWS, Padding, Piece, Zeros, feeds
from edgedec_runtimes.onnx.kv import KVBuffers
from edgedec_runtimes.onnx.letting_go import LET_GO_ROWS, let_go
from edgedec_runtimes.onnx.library import run_options, translated
from edgedec_runtimes.onnx.session import OnnxSession
from edgedec_runtimes.onnx.single_steps import one_row_is_exact

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


@dataclass(slots=True)
class Work:
    """One item of a forward, and where its results go: `logits` has SPARE_ROWS more than are asked for."""

    session: OnnxSession
    checked: Checked
    logits: NDArray[np.float32]
    hidden: Mapping[int, NDArray[np.float32]]


class OnnxModel:
    """Implements edgedec.model.Model.

    Attributes:
        lock: Held by whatever touches the graph and its sessions; see exclusive().
        stop: What cancels a forward.
        padding: What the row that makes their number even goes through.
    """

    def __init__(
        self,
        opened: Opened,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        n_kept_rows: int,
        cache_dir: Path | None,
    ) -> None:
        """Take over an opened graph.

        Args:
            opened: The graph.
            tokenizer: The vocabulary.
            card: The facts.
            terms: Makes the memory plan for a context and a number of rows.
            n_kept_rows: Rows of logits that have their place between forwards; one that wants more gets its own.
            cache_dir: Where the answer to `batch_invariant` is remembered, or None.
        """
        self._opened: Opened | None = opened
        self._export = opened.export
        self._tokenizer = tokenizer
        self._card = card
        self._terms = terms
        self._cache_dir = cache_dir
        self._invariant: int | None = None
        self._shape = Shape(card.n_vocab, card.n_embd, card.n_layer, MAX_ROWS)
        self._logits = np.empty((n_kept_rows + SPARE_ROWS, card.n_vocab), np.float32)
        self._zeros = Zeros()
        self.padding = Padding.ATTENTION
        self._running: Any = None  # the options of the run that is going on
        self.lock = ModelLock()
        self.stop = Stop()
        self._sessions: weakref.WeakSet[OnnxSession] = weakref.WeakSet()
        self._n_looked_up = 0  # tokens, since pages were let go
        if not one_row_is_exact(self, cache_dir):
            self.padding = Padding.ALL
        let_go(opened.mapped)

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""
        return self._card

    @property
    def capabilities(self) -> Capabilities:
        """All but resuming from hidden states, which the graph has no input for."""
        return Capabilities(
            rollback=True,
            trees=True,
            exact_trees=False,
            fork=True,
            layers=True,
            taps=True,
            hidden_input=False,
            max_rows=MAX_ROWS,
            prefill_chunk=CHUNK,
        )

    @property
    def tokenizer(self) -> Tokenizer:
        """The vocabulary of the export."""
        return self._tokenizer

    @property
    def export(self) -> Export:
        """What the model was loaded from."""
        return self._export

    @property
    def batch_invariant(self) -> int:
        """Measured at the first read: see edgedec_runtimes.invariance."""
        if self._invariant is None:
            self._invariant = measured_invariance(self, self._cache_dir)
        return self._invariant

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return self._terms(n_ctx, n_rows)

    def session(self, n_ctx: int) -> OnnxSession:
        """Open an empty session; the system gives its memory as tokens are written."""
        with self.exclusive() as opened:
            if n_ctx < 1 or n_ctx > 1 << 24:
                raise RequestError(f"n_ctx is {n_ctx}; a session holds 1 to {1 << 24} tokens")
            session = OnnxSession(self, KVBuffers(self._export, n_ctx), n_ctx, opened.graph.io_binding())
            self._sessions.add(session)
            return session

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions, one after another."""
        return self.forward_with_progress(items, None)

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        with self.exclusive() as opened:
            work = self._prepare(items)
            with self.stop.running([w.session for w in work]):
                outer, self._running = self._running, run_options(opened.ort)
                try:
                    for w in work:
                        self._run(opened, w, on_progress)
                finally:
                    self._running = outer
            return [Forward(w.logits[: len(w.checked.wanted)], w.hidden) for w in work]

    def cancel(self, session: OnnxSession) -> None:
        """Stop the forward that the session is in, also in the middle of a run."""
        running = self._running  # read first: options of a run that begins later must not be touched
        self.stop.cancel(session)
        if running is not None and self.stop.flag.value:
            running.terminate = True

    def _prepare(self, items: Sequence[ForwardItem]) -> list[Work]:
        if any(item.hidden is not None for item in items):
            self.capabilities.require("hidden_input", self._card.runtime)
        checked = check_items(items, self, self._shape)
        if any(c.parents is not None and c.n_rows > MAX_ROWS for c in checked):
            raise CapabilityError(f"a tree has over {MAX_ROWS} rows; a forward takes at most that")
        try:
            return list(self._with_results(items, checked))
        except MemoryError as error:
            raise MemoryCapError("no memory for a forward's results; ask for fewer rows or taps") from error

    def _with_results(self, items: Sequence[ForwardItem], checked: list[Checked]) -> Iterator[Work]:
        n_wanted, first = sum(len(c.wanted) for c in checked), 0
        logits = self._logits
        if len(logits) < n_wanted + SPARE_ROWS:
            logits = np.empty((n_wanted + SPARE_ROWS, self._card.n_vocab), np.float32)
        for item, c in zip(items, checked, strict=True):
            assert isinstance(item.session, OnnxSession), "a session of this model is one of this class"
            hidden = {tap: np.empty((c.n_rows, self._card.n_embd), np.float32) for tap in c.taps}
            yield Work(item.session, c, logits[first : first + len(c.wanted) + SPARE_ROWS], hidden)
            first += len(c.wanted)

    def _run(self, opened: Opened, work: Work, on_progress: OnProgress | None) -> None:
        """Evaluate an item: a tree at once, a long chain in pieces that end at multiples of CHUNK."""
        c, state = work.checked, work.session.state
        self.stop.check()
        state.begin(c)
        for begin, end in pieces(c):
            self.stop.check()
            self._run_piece(opened, work, Piece(c, begin, end))
            if c.parents is None:
                state.advance(end - begin)
            if on_progress is not None and c.n_rows > CHUNK:
                on_progress(Progress("prefill", end, c.n_rows, "tokens"))
        if c.parents is not None:
            state.become_branched()
        if c.n_rows > CHUNK:
            return_free_memory()

    def _run_piece(self, opened: Opened, work: Work, piece: Piece) -> None:
        """Run the graph once; its outputs are written to their places."""
        first = int(np.searchsorted(work.checked.wanted, piece.begin))
        inputs = feeds(piece, self._export, self._zeros, self.padding)
        outputs = {"logits": work.logits[first : first + len(inputs["logit_rows"])][None]}
        for tap, states in work.hidden.items():
            outputs[f"hidden_{tap}"] = states[piece.begin : piece.end][None]
        binding = work.session.bound(inputs, outputs)
        try:
            with translated("a forward"):
                opened.graph.run_with_iobinding(binding, self._running)
        except Exception:
            self.stop.check()  # what was cancelled says so
            raise
        self._n_looked_up += piece.n_rows
        if self._n_looked_up >= LET_GO_ROWS:
            self._n_looked_up = 0
            let_go(opened.mapped)

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
