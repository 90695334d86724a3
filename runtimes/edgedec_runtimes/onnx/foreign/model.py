"""A model on a graph that takes its KV cache as inputs and returns it longer: chains, evaluated piece by piece."""

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, RequestError
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Capabilities, Forward, ForwardItem, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.onnx.feeds import CHUNK, even
from edgedec_runtimes.onnx.foreign.contract import Contract, feeds
from edgedec_runtimes.onnx.foreign.session import Arrays, ForeignSession
from edgedec_runtimes.onnx.graph_model import MAX_ROWS, GraphModel, Opened, pieces
from edgedec_runtimes.onnx.letting_go import let_go
from edgedec_runtimes.onnx.single_steps import one_row_is_exact
from edgedec_runtimes.shared.bookkeeping import Checked, check_items, require_capable
from edgedec_runtimes.shared.invariance import N_MAX, ExactRows, measured_invariance

_PREFIXES = (40, 250)  # tokens before the rows compared: sums over a cache take other ways at other lengths
_CAPABILITIES = Capabilities(rollback=True, trees=False, fork=True, max_rows=MAX_ROWS, prefill_chunk=CHUNK)


class ForeignModel(GraphModel[ForeignSession]):
    """Implements edgedec.model.Model.

    Attributes:
        is_padded: Whether a forward of an odd number of rows gets one more, so that a single step has the bits of the
            same row among several; found by trying.
    """

    def __init__(
        self,
        opened: Opened,
        contract: Contract,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        cache_dir: Path | None,
    ) -> None:
        """Take over an opened graph.

        Args:
            opened: The graph.
            contract: Its sizes.
            tokenizer: The vocabulary.
            card: The facts.
            terms: Makes the memory plan for a context and a number of rows.
            cache_dir: Where the answer to `batch_invariant` is remembered, or None.
        """
        super().__init__(opened, tokenizer, card, terms, cache_dir)
        self._contract = contract
        self._logits = np.empty((1, CHUNK, card.n_vocab), np.float32)  # all rows of a piece: the graph returns no fewer
        self.is_padded = False
        self.is_padded = not one_row_is_exact(self, cache_dir)
        let_go(opened.mapped)

    @property
    def capabilities(self) -> Capabilities:
        """Chains, rollback and forks: the graph has no inputs for anything else."""
        return _CAPABILITIES

    @property
    def batch_invariant(self) -> int:
        """Measured at the first read, after prefixes of several lengths: see edgedec_runtimes.shared.invariance."""
        if self._invariant is None:
            n_most = self._card.n_ctx_train - N_MAX - 1
            found = [
                measured_invariance(self, self._cache_dir, n_prefix=n_prefix)
                for n_prefix in _PREFIXES
                if n_prefix <= n_most
            ]
            self._invariant = min(found, default=1)
        return self._invariant

    @cached_property
    def exact(self) -> ExactRows:
        """What is known of bit-equal rows in longer contexts."""
        return ExactRows(self, self._cache_dir)

    def session(self, n_ctx: int) -> ForeignSession:
        """Open an empty session, of at most as many tokens as the graph has positions for."""
        with self.exclusive():
            check_n_ctx(n_ctx, self._card.n_ctx_train)
            session = ForeignSession(self, n_ctx)
            self._sessions.add(session)
            return session

    def empty_caches(self, n_slots: int) -> Arrays:
        """Return arrays for the keys and values of n_slots tokens (MemoryCapError where there is no memory)."""
        c = self._contract
        try:
            return [np.empty((1, c.n_head_kv, n_slots, c.head_dim), np.float32) for _ in c.caches]
        except MemoryError as error:
            raise MemoryCapError(f"no memory for the keys and values of {n_slots} tokens; ask for fewer") from error

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        with self.exclusive() as opened:
            require_capable(items, _CAPABILITIES, self._card.runtime)
            checked = check_items(items, self, self._shape)
            sessions: list[Any] = [item.session for item in items]
            with self._stoppable(opened, sessions):
                return [self._run(opened, s, c, on_progress) for s, c in zip(sessions, checked, strict=True)]

    def _run(self, opened: Opened, session: Any, c: Checked, on_progress: OnProgress | None) -> Forward:
        assert isinstance(session, ForeignSession), "a session of this model is one of this class"
        logits = np.empty((len(c.wanted), self._card.n_vocab), np.float32)
        self.stop.check()
        session.state.begin(c)
        for begin, end in pieces(c):
            self.stop.check()
            rows = self._run_piece(opened, session, c, begin, end)
            first, last = np.searchsorted(c.wanted, (begin, end))
            logits[first:last] = rows[c.wanted[first:last] - begin]
            session.state.advance(end - begin)
            if on_progress is not None and c.n_rows > CHUNK:
                on_progress(Progress("prefill", end, c.n_rows, "tokens"))
        if c.n_rows > CHUNK:
            return_free_memory()
        return Forward(logits)

    def _run_piece(
        self, opened: Opened, session: ForeignSession, c: Checked, begin: int, end: int
    ) -> NDArray[np.float32]:
        """Run the graph on rows [begin, end) and return all their logits, f32[n, n_vocab], a view."""
        assert c.tokens is not None, "hidden states were refused"
        n_past, n_rows = c.n_past + begin, even(end - begin) if self.is_padded else end - begin
        past, present = session.past(n_past), self.empty_caches(n_past + n_rows)
        inputs: dict[str, NDArray[Any]] = {}
        inputs |= feeds(self._contract, c.tokens[begin:end], n_past, n_rows)
        outputs: dict[str, NDArray[Any]] = {"logits": self._logits[:, :n_rows]}
        for cache, before, after in zip(self._contract.caches, past, present, strict=True):
            inputs[f"past_key_values.{cache}"] = before
            outputs[f"present.{cache}"] = after
        binding = opened.graph.io_binding()
        for name, array in inputs.items():
            binding.bind_input(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        for name, array in outputs.items():
            binding.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)
        self._run_graph(opened, binding)
        session.hold(present)
        return self._logits[0, :n_rows]


def check_n_ctx(n_ctx: int, n_ctx_train: int) -> None:
    """Raise RequestError for a session of more tokens than the graph has positions for."""
    if not 1 <= n_ctx <= n_ctx_train:
        raise RequestError(f"n_ctx is {n_ctx}; a session of this export holds 1 to {n_ctx_train} tokens")
