"""A model on an NPU's graph, which evaluates chains block by block (`blocks`).

A forward is cut into runs of graphs with a fixed number of rows, so that a row's bits don't depend on the cut.

A run of the graph of 8 rows takes positions 8 i to 8 i + 7, however many of them are new. Rows before the new ones are
evaluated again (from their tokens, to the same keys and values); rows behind them are padding that no row sees. So a
position is always the same row of the same block on the same cached tokens, in a single step as in a long draft. The
graph of 64 rows takes only 64 new positions that begin at a multiple of 64: prefills have such blocks, drafts do not.

The graph takes keys and values of a sequence in two parts of 8 bits, as long as the context in use.

Slots behind the tokens that a forward builds on hold zeros, so that its bits cannot depend on anything left there:
hidden slots have no weight, but hardware that adds up in pieces may round differently by what they hold.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, OptionError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.npu.facts import LOGIT_ROWS, LOW_ZERO, PARTS, ROWS, Facts
from edgedec_runtimes.npu.graphs import Graphs
from edgedec_runtimes.npu.inputs import Arrays, position_inputs, quantized
from edgedec_runtimes.shared.library_model import LibraryModel
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.own_session import OwnSession
from edgedec_runtimes.shared.session_state import CheckedItem

STEP_ROWS, PREFILL_ROWS = ROWS


@dataclass(frozen=True, slots=True)
class Block:
    """One run of a graph.

    Attributes:
        start: Position of the run's first row; the tokens before it are cached.
        n_rows: Rows of the graph.
        first: Position of the first new row.
        stop: Position after the last new row.
    """

    start: int
    n_rows: int
    first: int
    stop: int


def blocks(n_past: int, n: int) -> Iterator[Block]:
    """Yield the runs that evaluate n new rows after n_past cached tokens.

    >>> [(b.start, b.n_rows, b.first, b.stop) for b in blocks(6, 3)]
    [(0, 8, 6, 8), (8, 8, 8, 9)]
    >>> [(b.start, b.n_rows, b.first, b.stop) for b in blocks(62, 68)]
    [(56, 8, 62, 64), (64, 64, 64, 128), (128, 8, 128, 130)]
    """
    at, end = n_past, n_past + n
    while at < end:
        if at % PREFILL_ROWS == 0 and at + PREFILL_ROWS <= end:
            block = Block(at, PREFILL_ROWS, at, at + PREFILL_ROWS)
        else:
            start = at - at % STEP_ROWS
            block = Block(start, STEP_ROWS, at, min(start + STEP_ROWS, end))
        yield block
        at = block.stop


class NpuSession(OwnSession):
    """Implements edgedec.model.Session.

    Attributes:
        cache: The keys and values.
        tokens: int32[n_ctx], the token at each cached position, as a block may be evaluated again.
    """

    def __init__(self, model: LibraryModel[Any, Any], facts: Facts, n_ctx: int) -> None:
        """Begin empty."""
        super().__init__(model, n_ctx)
        self._facts = facts
        self.cache = KVCache(facts)
        self.tokens = np.zeros(n_ctx, np.int32)

    def _fork(self) -> "NpuSession":
        """Return a second session with a copy of the cached prefix."""
        twin: NpuSession = self._model.session(self.n_ctx)
        n = self.n_cached
        twin.cache.take(self.cache.context, *self.cache.part(n))
        twin.tokens[:n] = self.tokens[:n]
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return self.tokens[:n], *self.cache.part(n)

    def _layout(self, n: int) -> Sequence[tuple[Any, tuple[int, ...]]]:
        shape, head_dim = (len(PARTS), self._facts.n_layer, self._facts.n_head_kv), self._facts.head_dim
        return (np.int32, (n,)), (np.uint8, (*shape, head_dim, n)), (np.uint8, (*shape, n, head_dim))

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> Literal[True]:
        tokens, keys, values = arrays
        self.tokens[:n] = tokens
        self.cache.take(self._facts.context_of(n), keys, values)
        return True

    def _free(self) -> None:
        self.cache.free()


U8 = NDArray[np.uint8]


class KVCache:
    """The buffers of a session.

    Attributes:
        context: How many slots the buffers have now; the token at position i lies in slot i.
        keys: uint8[2, n_layer, n_head_kv, head_dim, context], high and low parts, rotated to their position.
        values: uint8[2, n_layer, n_head_kv, context, head_dim].
    """

    def __init__(self, facts: Facts) -> None:
        """Begin empty, with the shortest context."""
        self._facts = facts
        self.context = self._n_used = 0
        high = np.array(facts.zeros, np.uint8).reshape(-1, 2).T
        parts = np.stack((high, np.full_like(high, LOW_ZERO)), axis=1)
        self._zeros = parts[..., None, None, None]  # uint8[2, 2, n_layer, 1, 1, 1]: (keys, values), (high, low)
        self.keys, self.values = self._arrays(0)
        self.begin(facts.contexts[0], 0)

    def begin(self, context: int, n_kept: int) -> None:
        """Change to `context` slots; the first n_kept keep their contents, the others hold zeros."""
        if context != self.context:
            keys, values = self._arrays(context)
            keys[..., :n_kept], values[..., :n_kept, :] = self.part(n_kept)
            self.context, self.keys, self.values = context, keys, values
        else:
            self.keys[..., n_kept : self._n_used] = self._zeros[0]
            self.values[..., n_kept : self._n_used, :] = self._zeros[1]
        self._n_used = n_kept

    def part(self, n: int) -> tuple[U8, U8]:
        """Return views of the first n slots."""
        return self.keys[..., :n], self.values[..., :n, :]

    def take(self, context: int, keys: U8, values: U8) -> None:
        """Change to `context` slots, of which the first hold these keys and values of all layers."""
        n = keys.shape[-1]
        self.begin(context, 0)
        self.keys[..., :n], self.values[..., :n, :] = keys, values
        self._n_used = n

    def inputs(self) -> Arrays:
        """Return the graph's inputs of keys and values by name; they are views."""
        arrays: Arrays = {}
        for part, name in enumerate(PARTS):
            for layer in range(self._facts.n_layer):
                arrays[f"past_key_{name}_{layer}"] = self.keys[part, layer]
                arrays[f"past_value_{name}_{layer}"] = self.values[part, layer]
        return arrays

    def names(self) -> Iterator[str]:
        """Yield the names of the graph's outputs of keys and values, in the order in which `write` takes them."""
        for part in PARTS:
            for layer in range(self._facts.n_layer):
                yield f"new_key_{part}_{layer}"
                yield f"new_value_{part}_{layer}"

    def write(self, start: int, n: int, outputs: Sequence[NDArray[Any]]) -> None:
        """Copy the first n rows of the graph's outputs to the slots from `start` on."""
        self._n_used = max(self._n_used, start + n)
        arrays = iter(outputs)
        for keys, values in zip(self.keys, self.values, strict=True):
            for layer in range(self._facts.n_layer):
                keys[layer, :, :, start : start + n] = next(arrays)[:, :, :n]
                values[layer, :, start : start + n] = next(arrays)[:, :n]

    def free(self) -> None:
        """Free the memory."""
        self.context = self._n_used = 0
        self.keys, self.values = self._arrays(0)

    def _arrays(self, context: int) -> tuple[U8, U8]:
        f = self._facts
        shape = len(PARTS), f.n_layer, f.n_head_kv
        keys = np.broadcast_to(self._zeros[0], (*shape, f.head_dim, context)).copy()
        return keys, np.broadcast_to(self._zeros[1], (*shape, context, f.head_dim)).copy()


_EXACT_ROWS = PREFILL_ROWS - 1
"""So many rows never fill a block of a prefill."""

_CAPABILITIES = Capabilities(rollback=True, trees=False, fork=True, max_rows=256, prefill_chunk=PREFILL_ROWS)


class NpuModel(LibraryModel[Graphs, NpuSession]):
    """Implements edgedec.model.Model.

    Attributes:
        facts: Sizes and quantization of the graph.
    """

    batch_invariant = _EXACT_ROWS

    def __init__(
        self,
        graphs: Graphs,
        embedding: NDArray[np.float16],
        files: MappedFiles,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
    ) -> None:
        """Take over the graphs of an export; what is not told here is as in LibraryModel.

        Args:
            embedding: f16[n_vocab, n_embd], mapped.
            files: The file that the embedding is mapped from.
        """

        def free() -> None:
            graphs.close()
            files.close()

        super().__init__(graphs, card, _CAPABILITIES, tokenizer, terms, free)
        self.facts: Facts = graphs.facts
        self._embedding, self._files = embedding, files

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
        logits = np.empty((len(item.logit_rows), self.card.n_vocab), np.float32)
        positions = item.logit_rows + item.n_past
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
        self, session: NpuSession, block: Block, row_numbers: NDArray[np.int32], logits: NDArray[np.float32]
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
        for at in range(0, max(1, len(row_numbers)), LOGIT_ROWS):
            rows = row_numbers[at : at + LOGIT_ROWS]
            inputs["logit_rows"] = np.resize(rows, LOGIT_ROWS) if len(rows) else np.zeros(LOGIT_ROWS, np.int32)
            outputs = self.handle.run(block.n_rows, context, inputs, [*names, "logits"])
            logits[at : at + len(rows)] = facts.quantizers["logits"].dequantize(outputs[-1][: len(rows)])
        cache.write(block.start, n, outputs)
