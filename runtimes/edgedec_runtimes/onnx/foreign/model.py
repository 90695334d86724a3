"""A model on a graph that takes its KV cache as inputs and returns it longer: chains, evaluated piece by piece."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import MemoryCapError, OptionError
from edgedec.memory.system import return_free_memory
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec.tokenizer import Tokenizer
from edgedec_runtimes.onnx.feeds import CHUNK, even
from edgedec_runtimes.onnx.foreign.contract import Contract, feeds
from edgedec_runtimes.onnx.graph_model import LOGIT_ROWS, GraphModel, Opened, bind_input, bind_output, pieces
from edgedec_runtimes.onnx.single_steps import one_row_is_exact
from edgedec_runtimes.shared.invariance import measured_invariance
from edgedec_runtimes.shared.measured_model import MeasuredModel, MeasuredSession
from edgedec_runtimes.shared.pages import give_back
from edgedec_runtimes.shared.session_state import CheckedItem

Arrays = list[NDArray[np.float32]]


class ForeignSession(MeasuredSession):
    """Implements edgedec.model.Session."""

    def __init__(self, model: MeasuredModel[Any, Any], contract: Contract, n_ctx: int) -> None:
        """Begin empty."""
        super().__init__(model, n_ctx)
        self._contract = contract
        self._cached = empty_caches(contract, 0)

    def past(self, n_past: int) -> Arrays:
        """Return the first n_past tokens' keys and values, f32[1, n_head_kv, n_past, head_dim] each.

        The arrays are copied where they hold more tokens, as the graph wants arrays without gaps.
        """
        self._cached = [np.ascontiguousarray(array[:, :, :n_past]) for array in self._cached]
        return self._cached

    def hold(self, arrays: Arrays) -> None:
        """Take over arrays that the graph returned; they may have one slot more than there are tokens."""
        self._cached = arrays

    def _fork(self) -> "ForeignSession":
        """Return a second session with the same arrays: neither writes to them."""
        twin: ForeignSession = self._model.session(self.n_ctx)
        twin.hold(list(self._cached))
        return twin

    def _arrays(self, n: int) -> Sequence[NDArray[Any]]:
        return [array[:, :, :n] for array in self._cached]

    def _layout(self, n: int) -> Sequence[tuple[Any, tuple[int, ...]]]:
        return [(np.float32, (1, self._contract.n_head_kv, n, self._contract.head_dim))] * len(self._contract.caches)

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> Literal[True]:
        self.hold([array.copy() for array in arrays])
        return True

    def _free(self) -> None:
        self._cached = []


def empty_caches(contract: Contract, n_slots: int) -> Arrays:
    """Return arrays for the keys and values of n_slots tokens (MemoryCapError where there is no memory)."""
    try:
        return [np.empty((1, contract.n_head_kv, n_slots, contract.head_dim), np.float32) for _ in contract.caches]
    except MemoryError as error:
        raise MemoryCapError(f"no memory for the keys and values of {n_slots} tokens; ask for fewer") from error


_PREFIXES = (40, 250)  # tokens before the compared rows: sums over caches of other lengths run in another order
_CAPABILITIES = Capabilities(rollback=True, trees=False, fork=True, max_rows=LOGIT_ROWS, prefill_chunk=CHUNK)


class ForeignModel(GraphModel[ForeignSession]):
    """Implements edgedec.model.Model.

    Attributes:
        is_padded: Whether a forward of an odd number of rows gets one row more, so that a single step has the bits of
            the same row among several; found by trying.
        session_type: The class of its sessions.
    """

    session_type: type[ForeignSession] = ForeignSession

    def __init__(
        self,
        opened: Opened,
        contract: Contract,
        tokenizer: Tokenizer,
        card: ModelCard,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        cache_dir: Path | None,
        capabilities: Capabilities = _CAPABILITIES,
    ) -> None:
        """Take over an opened graph, as GraphModel; `contract` has its sizes."""
        super().__init__(opened, card, capabilities, tokenizer, terms, cache_dir)
        self._contract = contract
        self._logits = np.empty((1, CHUNK, card.n_vocab), np.float32)  # all rows of a piece: the graph returns no fewer
        self.is_padded = False
        self.is_padded = capabilities.max_rows > 1 and not one_row_is_exact(self, cache_dir)
        give_back(opened.mapped)

    @cached_property
    def batch_invariant(self) -> int:  # measured at the first read
        """The largest n whose rows were found to be bit-equal to single steps, after prefixes of several lengths."""
        prefixes = [n for n in _PREFIXES if n <= self.card.n_ctx_train // 2]  # an encoder reads no more
        return min((measured_invariance(self, self._cache_dir, n_prefix=n) for n in prefixes), default=1)

    def session(self, n_ctx: int) -> ForeignSession:
        """Open an empty session, of at most as many tokens as the graph has positions for."""
        with self.lock:
            check_n_ctx(n_ctx, self.card.n_ctx_train)
            return self.adopt(self.session_type(self, self._contract, n_ctx))

    def _run(self, item: CheckedItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate a chain in pieces that end at multiples of CHUNK."""
        logits = np.empty((len(item.logit_rows), self.card.n_vocab), np.float32)
        self.stop.check()
        item.session.state.begin(item)
        for begin, end in pieces(item):
            self.stop.check()
            rows = self._run_piece(item, begin, end)
            first, last = bisect_left(item.logit_rows, begin), bisect_left(item.logit_rows, end)
            logits[first:last] = rows[item.logit_rows[first:last] - begin]
            item.session.state.advance(end - begin)
            if on_progress is not None and item.n_rows > CHUNK:
                on_progress(Progress("prefill", end, item.n_rows, "tokens"))
        if item.n_rows > CHUNK:
            return_free_memory()
        return Forward(logits)

    def _run_piece(self, item: CheckedItem, begin: int, end: int) -> NDArray[np.float32]:
        """Run the graph on rows [begin, end) and return all their logits, f32[n, n_vocab], a view."""
        tokens = item.groups[0].tokens
        assert tokens is not None, "vectors were refused"
        n_past, n_rows = item.n_past + begin, even(end - begin) if self.is_padded else end - begin
        past, present = item.session.past(n_past), empty_caches(self._contract, n_past + n_rows)
        inputs: dict[str, NDArray[Any]] = {}
        inputs |= feeds(self._contract, tokens[begin:end], n_past, n_rows)
        outputs: dict[str, NDArray[Any]] = {"logits": self._logits[:, :n_rows]}
        for cache, before, after in zip(self._contract.caches, past, present, strict=True):
            inputs[f"past_key_values.{cache}"] = before
            outputs[f"present.{cache}"] = after
        binding = self.handle.graph.io_binding()
        for name, array in inputs.items():
            bind_input(binding, name, array)
        for name, array in outputs.items():
            bind_output(binding, name, array)
        self._run_graph(binding)
        item.session.hold(present)
        return self._logits[0, :n_rows]


def check_n_ctx(n_ctx: int, n_ctx_train: int) -> None:
    """Raise RequestError for a session of more tokens than the graph has positions for."""
    if not 1 <= n_ctx <= n_ctx_train:
        raise OptionError("n_ctx", n_ctx, f"a session of this export holds 1 to {n_ctx_train} tokens")
