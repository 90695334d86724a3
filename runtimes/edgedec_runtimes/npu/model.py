"""A model on an NPU's graph, which evaluates chains block by block (`blocks`)."""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, OptionError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.npu.blocks import PREFILL_ROWS, Block, blocks
from edgedec_runtimes.npu.facts import LOGIT_ROWS, Facts
from edgedec_runtimes.npu.graphs import Graphs
from edgedec_runtimes.npu.inputs import position_inputs, quantized
from edgedec_runtimes.npu.session import NpuSession
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.session_state import CheckedItem

_EXACT_ROWS = PREFILL_ROWS - 1
"""So many rows never fill a block of a prefill."""

_CAPABILITIES = Capabilities(rollback=True, trees=False, fork=True, max_rows=256, prefill_chunk=PREFILL_ROWS)


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
            graphs: The graphs of the export.
            embedding: f16[n_vocab, n_embd], mapped.
            files: The file that the embedding is mapped from.
            tokenizer: The vocabulary.
            card: The facts of the model.
            terms: Makes the memory plan for a context and a number of rows.
        """

        def free() -> None:
            graphs.close()
            files.close()

        super().__init__(graphs, card, _CAPABILITIES, tokenizer, terms, free)
        self.facts: Facts = graphs.facts
        self._embedding, self._files = embedding, files

    @property
    def batch_invariant(self) -> int:
        """The number of rows that `blocks` never puts into a block of a prefill; a constant by construction."""
        return _EXACT_ROWS

    def session(self, n_ctx: int) -> NpuSession:
        """Open an empty session; its buffers grow from context to context."""
        with self.lock:
            most = self.facts.contexts[-1]
            if not 1 <= n_ctx <= most:
                raise OptionError(
                    "n_ctx",
                    n_ctx,
                    f"a session of this export holds 1 to {most} tokens: export it with larger contexts for more",
                )
            try:
                return self.adopt(NpuSession(self, self.facts, n_ctx))
            except MemoryError as error:
                raise MemoryCapError(f"no memory for a session of {n_ctx} tokens; ask for a shorter one") from error

    def _run(self, item: CheckedItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate a chain block by block."""
        session, end = item.session, item.n_past + item.n_rows
        logits = np.empty((len(item.wanted), self.card.n_vocab), np.float32)
        positions = item.wanted + item.n_past
        self.stop.check()
        session.state.begin(item)
        session.tokens[item.n_past : end] = item.groups[0].tokens
        for block in blocks(item.n_past, item.n_rows):
            if block.start % PREFILL_ROWS == 0:
                self.stop.check()
            first, last = np.searchsorted(positions, (block.first, block.stop))
            self._run_block(session, block, positions[first:last] - block.start, logits[first:last])
            session.state.advance(block.stop - block.first)
            if on_progress is not None and item.n_rows > PREFILL_ROWS:
                on_progress(Progress("prefill", block.stop - item.n_past, item.n_rows, "tokens"))
        return Forward(logits)

    def _run_block(
        self, session: NpuSession, block: Block, wanted: NDArray[np.int32], logits: NDArray[np.float32]
    ) -> None:
        """Run the graph on a block as often as its wanted rows need; `logits` takes them, f32[len(wanted), n_vocab]."""
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
            outputs = self.handle.run(block.n_rows, context, inputs, [*names, "logits"])
            logits[at : at + len(rows)] = facts.quantizers["logits"].dequantize(outputs[-1][: len(rows)])
        cache.write(block.start, n, outputs)
