"""A GGUF loaded by llama.cpp, and the forwards of its sessions."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, OptionError, RequestError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Forward
from edgedec.model_card import Capabilities, ModelCard
from edgedec.progress import OnProgress, Progress
from edgedec_runtimes.llamacpp.context import N_UBATCH, Context, ContextOptions, Pool
from edgedec_runtimes.llamacpp.library import llama
from edgedec_runtimes.llamacpp.session import LlamaCppSession
from edgedec_runtimes.llamacpp.tokenizer import LlamaCppTokenizer
from edgedec_runtimes.shared.mapped_files import MappedFiles
from edgedec_runtimes.shared.measured_model import MeasuredModel
from edgedec_runtimes.shared.session_state import CheckedItem

_PLACED = (8, 40)
"""The kinds of rotation (LLAMA_ROPE_TYPE_MROPE and _IMROPE) with places for pictures' rows."""
Rows = tuple[CheckedItem, list[NDArray[np.float32]], int, int]
"""An item, what its rows of logits are added to, and which of its rows, [start, stop)."""


class LlamaCppModel(MeasuredModel[Any, LlamaCppSession]):
    """Implements edgedec.model.Model."""

    def __init__(
        self,
        handle: Any,
        files: MappedFiles | None,
        card: ModelCard,
        options: ContextOptions,
        n_parallel: int,
        terms: Callable[[int, int], tuple[MemoryTerm, ...]],
        cache_dir: Path | None,
    ) -> None:
        """Take over a loaded model; what is not told here is as in LibraryModel.

        Args:
            files: The files that its weights are mapped from, or None.
            options: How its contexts are made.
            n_parallel: Sessions that the first context holds.
        """
        pools: list[Pool] = []
        super().__init__(
            handle,
            card,
            _capabilities(handle, options),
            LlamaCppTokenizer(self._vocabulary),
            terms,
            partial(_free, handle, pools, files),
            cache_dir,
            tree_rows=N_UBATCH,
            logit_rows=options.n_sequences,  # each session may have one, see context_params
        )
        self.has_places = llama().llama_model_rope_type(handle) in _PLACED
        self._n_input = int(llama().llama_model_n_embd_inp(handle))
        self._finalizer.atexit = True  # llama.cpp's GPU back ends want their memory back before the process ends
        self._options = options
        self._n_parallel = n_parallel
        self._pools = pools
        self._files = files

    def session(self, n_ctx: int) -> LlamaCppSession:
        """Open an empty session, in a context with room or in a new one."""
        with self.lock:
            self._check_files()
            if n_ctx < 1:
                raise OptionError("n_ctx", n_ctx, "a session holds at least 1 token")
            pool = next((p for p in self._pools if p.free_ids and p.context.n_cells - p.n_reserved >= n_ctx), None)
            if pool is None:
                pool = self._new_pool(n_ctx * (self._n_parallel if not self._pools else 1))
            pool.n_reserved += n_ctx
            return self.adopt(LlamaCppSession(self, pool, pool.free_ids.pop(0), n_ctx, n_ctx))

    def _new_pool(self, n_cells: int) -> Pool:
        options = replace(self._options, n_cells=n_cells)
        context = Context(self.handle, self.card.n_vocab, options, self.stop, self._files)
        pool = Pool(context, self._pools, list(range(options.n_sequences)))
        self._pools.append(pool)
        return pool

    def _evaluate(self, checked: list[CheckedItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions, together where they share a context."""
        self._check_files()
        for item in checked:
            self._check_tree(item)
            self._check_vectors(item)
        for item in checked:
            item.session.begin(item)
        logits: list[list[NDArray[np.float32]]] = [[] for _ in checked]
        n_total, n_done = sum(item.n_rows for item in checked), 0
        for group in _groups(checked, logits):
            self.stop.check()
            n_done += _n_rows(group)
            _decode(group, is_last=n_done == n_total)
            if on_progress is not None and n_total > N_UBATCH:
                on_progress(Progress("prefill", n_done, n_total, "tokens"))
        return [Forward(_joined(rows, self.card.n_vocab)) for rows in logits]

    def _check_tree(self, item: CheckedItem) -> None:
        """Raise CapabilityError where a tree is larger than the session's context takes."""
        if item.parents is None:
            return
        n, n_most = item.n_rows, min(N_UBATCH, item.session.pool.context.n_batch)
        n_leaves = n - len(set(item.parents.tolist()) - {-1})
        if n > n_most or n_leaves > self._options.logit_rows:
            raise CapabilityError(
                f"a tree of {n} rows and {n_leaves} leaves is over the {n_most} rows and "
                f"{self._options.logit_rows} leaves the model was loaded for"
            )

    def _check_vectors(self, item: CheckedItem) -> None:
        """Raise an error for vectors that are too short for llama.cpp, or over which it would end the process."""
        vectors, block = item.groups[0].vectors, item.groups[0].block
        if vectors is None:
            if block is not None:
                raise CapabilityError(
                    "tokens that see each other are not for the llamacpp runtime; use the cpu runtime"
                )
            return
        if vectors.shape[1] != self._n_input:
            raise RequestError(
                f"vectors have {vectors.shape[1]} numbers, and this model reads {self._n_input}; "
                "use the projector that was made for the model"
            )
        n_most = min(N_UBATCH, item.session.pool.context.n_batch)
        if block is not None and block.mutual and item.n_rows > n_most:
            raise CapabilityError(
                f"{item.n_rows} rows of a picture see each other; the context takes at most {n_most} such rows: "
                "load the model with a longer context, or ask for fewer tokens for a picture"
            )

    def _check_files(self) -> None:
        """Raise ModelFormatError where a file that the weights are mapped from has changed."""
        if self._files is not None:
            self._files.check()

    def _vocabulary(self) -> Any:
        """Return the native vocabulary; does not wait for a forward (SessionError once the model is closed)."""
        self.lock.check()
        return llama().llama_model_get_vocab(self.handle)


def _capabilities(handle: Any, options: ContextOptions) -> Capabilities:
    """Return what llama.cpp can do with a model; recurrent state can't go back, be shared or branch."""
    recurrent = llama().llama_model_is_recurrent(handle) or llama().llama_model_is_hybrid(handle)
    branches = not recurrent and options.logit_rows > 1
    return Capabilities(
        rollback=not recurrent,
        trees=branches,
        fork=branches,
        vector_rows=True,
        max_rows=options.logit_rows,
        prefill_chunk=N_UBATCH,
    )


def _free(handle: Any, pools: list[Pool], files: MappedFiles | None) -> None:
    if files is not None:
        files.close()
    for pool in pools:
        pool.context.close()
    llama().llama_model_free(handle)


def _decode(group: list[Rows], *, is_last: bool) -> None:
    """Evaluate rows of one context together; `is_last` when no other decode follows, which would overwrite logits."""
    parts = []
    for item, _, start, stop in group:
        mask = np.zeros(stop - start, dtype=np.bool_)
        mask[item.logit_rows[(item.logit_rows >= start) & (item.logit_rows < stop)] - start] = True
        parts.append(item.session.part(item, start, stop, mask))
    try:
        group[0][0].session.use_adapters()
        results = group[0][0].session.pool.context.decode(parts)
        for (item, rows, start, stop), logits in zip(group, results, strict=True):
            rows.append(logits if is_last else logits.copy())
            item.session.state.advance(stop - start)
    except BaseException:  # KeyboardInterrupt too, which arrives when the native call returns
        for item, _, _, _ in group:
            item.session.abandon()
        raise


def _groups(checked: list[CheckedItem], logits: list[list[NDArray[np.float32]]]) -> list[list[Rows]]:
    """Arrange rows in decodes: long prefills by themselves, all but their ends; then the ends of equal adapters."""
    groups: list[list[Rows]] = []
    ends: dict[tuple[int, tuple[float, ...]], list[list[Rows]]] = {}
    for item, rows in zip(checked, logits, strict=True):
        start, context = 0, item.session.pool.context
        for stop in prefill_chunks(item.n_rows)[:-1]:
            groups.append([(item, rows, start, stop)])
            start = stop
        if item.groups[0].vectors is not None:  # a decode has tokens or vectors
            groups.append([(item, rows, start, item.n_rows)])
            continue
        batches = ends.setdefault((id(context), item.session.scales), [[]])
        if _n_rows(batches[-1]) + item.n_rows - start > context.n_batch:
            batches.append([])
        batches[-1].append((item, rows, start, item.n_rows))
    return groups + [batch for batches in ends.values() for batch in batches if batch]


def prefill_chunks(n_rows: int) -> list[int]:
    """Return where the pieces end in which `n_rows` new rows are evaluated: every micro-batch.

    A prefill that starts at a multiple of the micro-batch is split where a cold start is split, so a prefix reused up
    to such a border has a cold start's bits.

    >>> prefill_chunks(1200), prefill_chunks(8)
    ([512, 1024, 1200], [8])
    """
    return [*range(N_UBATCH, n_rows, N_UBATCH), n_rows]


def _n_rows(group: list[Rows]) -> int:
    return sum(stop - start for _, _, start, stop in group)


def _joined(pieces: list[NDArray[np.float32]], n_vocab: int) -> NDArray[np.float32]:
    filled = [piece for piece in pieces if len(piece)]
    if len(filled) == 1:
        return filled[0]
    return np.concatenate(filled) if filled else np.empty((0, n_vocab), np.float32)
