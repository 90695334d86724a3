"""A model on an NPU's graph: chains, evaluated block by block (`blocks`)."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, RequestError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Capabilities, Forward, ForwardItem, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.npu.blocks import PREFILL_ROWS, Block, blocks
from edgedec_runtimes.npu.facts import LOGIT_ROWS, Facts
from edgedec_runtimes.npu.graphs import Graphs
from edgedec_runtimes.npu.inputs import position_inputs, quantized
from edgedec_runtimes.npu.session import NpuSession
from edgedec_runtimes.shared.bookkeeping import Checked, check_items, require_capable
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.mapped_files import MappedFiles

MAX_ROWS = 256
"""Most rows of logits of a forward."""

_EXACT_ROWS = PREFILL_ROWS - 1
"""Rows that never fill a block of a prefill."""

_CAPABILITIES = Capabilities(rollback=True, trees=False, fork=True, max_rows=MAX_ROWS, prefill_chunk=PREFILL_ROWS)


class NpuModel(LibraryModel[Graphs, NpuSession]):
    """Implements edgedec.model.Model.

    Attributes:
        facts: Sizes and quantization of the graph.
    """

    def __init__(
        self,
        graphs: Graphs,
        embedding: NDArray[np.float16],
        files: MappedFiles,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
    ) -> None:
        """Take over graphs.

        Args:
            graphs: Of the export.
            embedding: f16[n_vocab, n_embd], mapped.
            files: Where it is mapped from.
            tokenizer: The vocabulary.
            card: The facts that the engine needs.
            terms: Makes the memory plan for a context and a number of rows.
        """
        super().__init__(graphs, tokenizer, card, terms, MAX_ROWS)
        self.facts: Facts = graphs.facts
        self._embedding, self._files = embedding, files

    @property
    def capabilities(self) -> Capabilities:
        """Chains, rollback and forks."""
        return _CAPABILITIES

    @property
    def batch_invariant(self) -> int:
        """What `blocks` gives by construction, where a graph's row does not depend on the others' contents."""
        return _EXACT_ROWS

    def session(self, n_ctx: int) -> NpuSession:
        """Open an empty session; its buffers grow from context to context."""
        with self.exclusive():
            most = self.facts.contexts[-1]
            if not 1 <= n_ctx <= most:
                raise RequestError(
                    f"n_ctx is {n_ctx}; a session of this export holds 1 to {most} tokens: export it with larger "
                    "contexts for more"
                )
            try:
                session = NpuSession(self, n_ctx)
            except MemoryError as error:
                raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error
            self._sessions.add(session)
            return session

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        with self.exclusive() as graphs:
            require_capable(items, _CAPABILITIES, self._card.runtime)
            checked = check_items(items, self, self._shape)
            sessions = [item.session for item in items]
            with self.stop.running(sessions):
                return [self._run(graphs, s, c, on_progress) for s, c in zip(sessions, checked, strict=True)]

    def _run(self, graphs: Graphs, session: Any, c: Checked, on_progress: OnProgress | None) -> Forward:
        assert isinstance(session, NpuSession), "a session of this model is one of this class"
        assert c.tokens is not None, "hidden states were refused"
        logits = np.empty((len(c.wanted), self._card.n_vocab), np.float32)
        self.stop.check()
        session.state.begin(c)
        session.tokens[c.n_past : c.n_past + c.n_rows] = c.tokens
        for block in blocks(c.n_past, c.n_rows):
            if block.start % PREFILL_ROWS == 0:
                self.stop.check()
            positions = c.wanted + c.n_past
            first, last = np.searchsorted(positions, (block.first, block.stop))
            self._evaluate(graphs, session, block, positions[first:last] - block.start, logits[first:last])
            session.state.advance(block.stop - block.first)
            if on_progress is not None and c.n_rows > PREFILL_ROWS:
                on_progress(Progress("prefill", block.stop - c.n_past, c.n_rows, "tokens"))
        return Forward(logits)

    def _evaluate(
        self,
        graphs: Graphs,
        session: NpuSession,
        block: Block,
        wanted: NDArray[np.int32],
        logits: NDArray[np.float32],
    ) -> None:
        """Run a block, as often as its rows of logits need: f32[len(wanted), n_vocab]."""
        facts, cache = self.facts, session.cache
        context = facts.context_of(block.start + block.n_rows)
        cache.begin(context, block.start)
        tokens = np.zeros(block.n_rows, np.int32)
        n = block.stop - block.start
        tokens[:n] = session.tokens[block.start : block.stop]
        inputs = position_inputs(facts, block.start, block.n_rows, context) | cache.inputs()
        inputs["hidden"] = quantized(facts, self._embedding[tokens])
        self._files.check()
        names = list(cache.names())
        for at in range(0, max(1, len(wanted)), LOGIT_ROWS):
            rows = wanted[at : at + LOGIT_ROWS]
            inputs["logit_rows"] = np.resize(rows, LOGIT_ROWS) if len(rows) else np.zeros(LOGIT_ROWS, np.int32)
            outputs = graphs.run(block.n_rows, context, inputs, [*names, "logits"])
            logits[at : at + len(rows)] = facts.quantizers["logits"].dequantize(outputs[-1][: len(rows)])
        cache.write(block.start, n, outputs)

    def _free(self, held: Graphs) -> None:
        held.close()
        self._files.close()
