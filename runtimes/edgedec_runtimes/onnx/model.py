"""A model on ONNX Runtime: one opened graph, and forwards that feed it piece by piece."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, MemoryCapError, RequestError
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Capabilities, Forward, ForwardItem, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.onnx.exported import Export
from edgedec_runtimes.onnx.feeds import CHUNK, SPARE_ROWS, Padding, Piece, Zeros, feeds
from edgedec_runtimes.onnx.graph_model import MAX_ROWS, GraphModel, Opened, pieces
from edgedec_runtimes.onnx.kv import KVBuffers
from edgedec_runtimes.onnx.letting_go import LET_GO_ROWS, let_go
from edgedec_runtimes.onnx.session import OnnxSession
from edgedec_runtimes.onnx.single_steps import one_row_is_exact
from edgedec_runtimes.shared.bookkeeping import Checked, check_items, require_capable
from edgedec_runtimes.shared.invariance import ExactRows, measured_invariance


@dataclass(slots=True)
class Work:
    """One item of a forward, and where its results go: `logits` has SPARE_ROWS more than are asked for."""

    session: OnnxSession
    checked: Checked
    logits: NDArray[np.float32]
    hidden: Mapping[int, NDArray[np.float32]]


class OnnxModel(GraphModel[OnnxSession]):
    """Implements edgedec.model.Model.

    Attributes:
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
        super().__init__(opened, tokenizer, card, terms, cache_dir)
        self._export = opened.export
        self._logits = np.empty((n_kept_rows + SPARE_ROWS, card.n_vocab), np.float32)
        self._zeros = Zeros()
        self.padding = Padding.ATTENTION
        self._n_looked_up = 0  # tokens, since pages were let go
        if not one_row_is_exact(self, cache_dir):
            self.padding = Padding.ALL
        let_go(opened.mapped)

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
    def export(self) -> Export:
        """What the model was loaded from."""
        return self._export

    @property
    def batch_invariant(self) -> int:
        """Measured at the first read: see edgedec_runtimes.shared.invariance."""
        if self._invariant is None:
            self._invariant = measured_invariance(self, self._cache_dir)
        return self._invariant

    @cached_property
    def exact(self) -> ExactRows:
        """What is known of bit-equal rows in longer contexts."""
        return ExactRows(self, self._cache_dir)

    def session(self, n_ctx: int) -> OnnxSession:
        """Open an empty session; the system gives its memory as tokens are written."""
        with self.exclusive() as opened:
            if n_ctx < 1 or n_ctx > 1 << 24:
                raise RequestError(f"n_ctx is {n_ctx}; a session holds 1 to {1 << 24} tokens")
            session = OnnxSession(self, KVBuffers(self._export, n_ctx), n_ctx, opened.graph.io_binding())
            self._sessions.add(session)
            return session

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        with self.exclusive() as opened:
            work = self._prepare(items)
            with self._stoppable(opened, [w.session for w in work]):
                for w in work:
                    self._run(opened, w, on_progress)
            return [Forward(w.logits[: len(w.checked.wanted)], w.hidden) for w in work]

    def _prepare(self, items: Sequence[ForwardItem]) -> list[Work]:
        require_capable(items, self.capabilities, self._card.runtime)
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
        self._run_graph(opened, binding)
        self._n_looked_up += piece.n_rows
        if self._n_looked_up >= LET_GO_ROWS:
            self._n_looked_up = 0
            let_go(opened.mapped)
