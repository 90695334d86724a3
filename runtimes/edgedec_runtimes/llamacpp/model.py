"""A GGUF loaded by llama.cpp, and the forwards of its sessions."""

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, RequestError, SessionError
from edgedec.memory_plan import MemoryTerm
from edgedec.model import Capabilities, Forward, ForwardItem, ModelCard, Rows
from edgedec.progress import OnProgress, Progress
from edgedec_runtimes.llamacpp.context import N_UBATCH, Context, ContextOptions, Part
from edgedec_runtimes.llamacpp.library import llama
from edgedec_runtimes.llamacpp.session import LlamaCppSession, prefill_chunks
from edgedec_runtimes.llamacpp.tokenizer import LlamaCppTokenizer
from edgedec_runtimes.shared.bookkeeping import ModelLock, Stop
from edgedec_runtimes.shared.invariance import ExactRows, measured_invariance
from edgedec_runtimes.shared.mapped_files import MappedFiles


@dataclass(slots=True)
class Pool:
    """A context, the sequence ids that are free in it, and the cells that sessions have reserved."""

    context: Context
    free_ids: list[int]
    n_reserved: int = 0


@dataclass(frozen=True, slots=True)
class Work:
    """One item of a forward, checked and ready to be evaluated."""

    session: LlamaCppSession
    item: ForwardItem
    tokens: NDArray[np.int32]
    wanted: NDArray[np.bool_]
    logits: list[NDArray[np.float32]] = field(default_factory=list)


class LlamaCppModel:
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
        self._handle = handle
        self._card = card
        self._options = options
        self._n_parallel = n_parallel
        self._terms = terms
        self._cache_dir = cache_dir
        self._pools: list[Pool] = []
        # Sessions of one context share native state: whatever touches it goes one at a time.
        self.lock = ModelLock()
        self.stop = Stop()
        self._sessions: weakref.WeakSet[LlamaCppSession] = weakref.WeakSet()
        self._tokenizer = LlamaCppTokenizer(self._vocabulary)
        self._files = files
        self._finalizer = weakref.finalize(self, _free, handle, self._pools, files, os.getpid())

    @property
    def card(self) -> ModelCard:
        """The facts of the model."""
        return self._card

    @cached_property
    def capabilities(self) -> Capabilities:
        """What llama.cpp can do with this model; recurrent state can't go back, be shared or branch."""
        api = llama()
        recurrent = api.llama_model_is_recurrent(self._handle) or api.llama_model_is_hybrid(self._handle)
        branches = not recurrent and self._options.max_rows > 1
        return Capabilities(
            rollback=not recurrent,
            trees=branches,
            fork=branches,
            max_rows=self._options.max_rows,
            prefill_chunk=N_UBATCH,
        )

    @property
    def tokenizer(self) -> LlamaCppTokenizer:
        """The vocabulary of the file."""
        return self._tokenizer

    @cached_property
    def batch_invariant(self) -> int | Literal[True]:
        """The largest n whose rows a probe finds bit-equal to single steps; measured once per model and options."""
        return measured_invariance(self, self._cache_dir)

    @cached_property
    def exact(self) -> ExactRows:
        """What is known of bit-equal rows in longer contexts."""
        return ExactRows(self, self._cache_dir)

    def memory(self, n_ctx: int, n_rows: int) -> tuple[MemoryTerm, ...]:
        """Return what the process will hold with one session of `n_ctx` tokens and `n_rows` rows of logits."""
        return self._terms(n_ctx, n_rows)

    def session(self, n_ctx: int) -> LlamaCppSession:
        """Open an empty session, in a context with room or in a new one."""
        with self.lock:
            return self._open_session(n_ctx)

    def _open_session(self, n_ctx: int) -> LlamaCppSession:
        self._check_open()
        if n_ctx < 1:
            raise RequestError(f"n_ctx is {n_ctx}; a session holds at least 1 token")
        pool = next((p for p in self._pools if p.free_ids and p.context.n_cells - p.n_reserved >= n_ctx), None)
        if pool is None:
            pool = self._new_pool(n_ctx * (self._n_parallel if not self._pools else 1))
        pool.n_reserved += n_ctx
        session = LlamaCppSession(self, pool.context, pool.free_ids.pop(0), n_ctx)
        self._sessions.add(session)
        return session

    def _new_pool(self, n_cells: int) -> Pool:
        options = replace(self._options, n_cells=n_cells)
        context = Context(self._handle, self._card.n_vocab, options, self.stop)
        pool = Pool(context, list(range(options.n_sequences)))
        self._pools.append(pool)
        return pool

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate rows of several sessions, together where they share a context."""
        return self.forward_with_progress(items, None)

    def forward_with_progress(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        """Evaluate rows of several sessions; `on_progress` is told of the tokens of a long prefill."""
        with self.lock:
            return self._forward(items, on_progress)

    def _forward(self, items: Sequence[ForwardItem], on_progress: OnProgress | None) -> list[Forward]:
        self._check_open()
        work = [self._prepare(item) for item in items]
        if len({id(w.session) for w in work}) != len(work):
            raise RequestError("a session stands twice in one forward")
        with self.stop.running([w.session for w in work]):
            for w in work:
                w.session.rewind(w.item.n_past)
            n_total, n_done = sum(len(w.tokens) for w in work), 0
            for group in _groups(work):
                self.stop.check()
                n_done += self._run(group, last=n_done + _n_rows(group) == n_total)
                if on_progress is not None and n_total > N_UBATCH:
                    on_progress(Progress("prefill", n_done, n_total, "tokens"))
        return [Forward(_joined(w.logits, self._card.n_vocab)) for w in work]

    def _prepare(self, item: ForwardItem) -> Work:
        session = item.session
        if not isinstance(session, LlamaCppSession) or session.model is not self:
            raise SessionError("a forward was given a session of another model")
        tokens = session.check(item)
        if item.parents is not None:
            self._check_tree(item.parents, len(tokens), min(N_UBATCH, session.context.n_batch))
        wanted = _wanted(item.rows, len(tokens))
        if int(wanted.sum()) > self._options.max_rows:
            raise CapabilityError(
                f"{int(wanted.sum())} rows of logits were asked for; "
                f"the model was loaded for {self._options.max_rows} (max_rows)"
            )
        return Work(session, item, tokens, wanted)

    def _check_tree(self, parents: NDArray[np.int32], n: int, n_max: int) -> None:
        self.capabilities.require("trees", "llamacpp")
        if parents.shape != (n,) or not np.all((parents >= -1) & (parents < np.arange(n))):
            raise RequestError(f"parents must be {n} row numbers, each -1 or below its own row, found {parents}")
        n_leaves = n - len(set(parents.tolist()) - {-1})
        if n > n_max or n_leaves > self._options.max_rows:
            raise CapabilityError(
                f"a tree of {n} rows and {n_leaves} leaves is over the {n_max} rows and "
                f"{self._options.max_rows} leaves the model was loaded for"
            )

    def _run(self, group: list[tuple[Work, int, int]], *, last: bool) -> int:
        """Evaluate pieces (work, first row, end row) in one decode; `last` when no other decode follows."""
        context = group[0][0].session.context
        parts: list[Part] = []
        for work, start, stop in group:
            tokens, wanted, parents = work.tokens[start:stop], work.wanted[start:stop], work.item.parents
            if parents is None:
                parts.append(work.session.chain_part(tokens, work.session.n_cached, wanted))
            else:
                parts.append(work.session.tree_part(tokens, parents, wanted))
        try:
            results = self._decode(context, parts)
            for (work, start, stop), logits in zip(group, results, strict=True):
                work.logits.append(logits if last else logits.copy())
                if work.item.parents is None:
                    work.session.advance(stop - start)
        except BaseException:  # KeyboardInterrupt too, which arrives when the native call returns
            for work, _, _ in group:
                work.session.abandon()
            raise
        return _n_rows(group)

    def _decode(self, context: Context, parts: Sequence[Part]) -> list[NDArray[np.float32]]:
        """Evaluate parts (ModelFormatError where a mapped file changed meanwhile: the results are of no use then)."""
        results = context.decode(parts)
        if self._files is not None:
            self._files.check()
        return results

    def evaluate_again(self, session: LlamaCppSession, tokens: NDArray[np.int32]) -> None:
        """Evaluate tokens as a chain, without logits, in single steps: their bits are always a chain's."""
        nothing = np.zeros(1, dtype=np.bool_)
        for start in range(len(tokens)):
            try:
                self._decode(
                    session.context, [session.chain_part(tokens[start : start + 1], session.n_cached, nothing)]
                )
                session.advance(1)
            except BaseException:
                session.abandon()
                raise

    def take_sequences(self, context: Context, n: int) -> tuple[int, ...]:
        """Reserve `n` sequence ids of a context (CapabilityError when it has no more)."""
        pool = self._pool(context)
        if len(pool.free_ids) < n:
            raise CapabilityError(
                f"{n} more sequences are over the {self._options.n_sequences} the model was loaded for; "
                f"close forks, or load with a larger n_parallel or max_rows"
            )
        taken, pool.free_ids[:n] = tuple(pool.free_ids[:n]), []
        return taken

    def give_sequences(self, context: Context, sequences: tuple[int, ...]) -> None:
        """Give sequence ids back."""
        self._pool(context).free_ids.extend(sequences)

    def adopt(self, session: LlamaCppSession) -> None:
        """Count a fork among the sessions that close with the model."""
        self._sessions.add(session)

    def release(self, session: LlamaCppSession, sequence: int) -> None:
        """Take back what a closed session held; the first context stays for the next one."""
        pool = self._pool(session.context)
        pool.free_ids.append(sequence)
        if not session.is_fork:
            pool.n_reserved -= session.n_ctx
        if len(pool.free_ids) == self._options.n_sequences and pool is not self._pools[0]:
            self._pools.remove(pool)
            pool.context.close()

    def _pool(self, context: Context) -> Pool:
        return next(pool for pool in self._pools if pool.context is context)

    def _vocabulary(self) -> Any:
        if not self._finalizer.alive:
            raise SessionError("the model is closed; load it again")
        return llama().llama_model_get_vocab(self._handle)

    def _check_open(self) -> None:
        if not self._finalizer.alive:
            raise SessionError("the model is closed; load it again")
        self.lock.check_process()
        if self._files is not None:
            self._files.check()

    def close(self) -> None:
        """Free the weights and every session; calling it again does nothing."""
        with self.lock:
            if self._finalizer.alive and self.lock.is_ours:
                for session in list(self._sessions):
                    session.close()
            self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _free(handle: Any, pools: list[Pool], files: MappedFiles | None, pid: int) -> None:
    """Free native memory; a forked child leaves the parent's alone."""
    if files is not None:
        files.close()
    if os.getpid() == pid:
        for pool in pools:
            pool.context.close()
        llama().llama_model_free(handle)


def _wanted(rows: Rows, n: int) -> NDArray[np.bool_]:
    """Return bool[n], the rows whose logits are asked for."""
    wanted = np.zeros(n, dtype=np.bool_)
    if isinstance(rows, str):
        if rows not in ("all", "last"):
            raise RequestError(f"rows is {rows!r}; it must be 'all', 'last' or row numbers")
        wanted[0 if rows == "all" else n - 1 :] = True
        return wanted
    indices = np.asarray(rows)
    if indices.ndim != 1 or np.any(indices < 0) or np.any(indices >= n) or np.any(np.diff(indices) <= 0):
        raise RequestError(f"rows must be ascending row numbers from 0 to {n - 1}, found {indices.tolist()}")
    wanted[indices] = True
    return wanted


def _groups(work: list[Work]) -> list[list[tuple[Work, int, int]]]:
    """Arrange rows in decodes: long prefills by themselves, all but their ends; then the ends together."""
    groups: list[list[tuple[Work, int, int]]] = []
    ends: dict[int, list[list[tuple[Work, int, int]]]] = {}
    for w in work:
        start = 0
        for stop in prefill_chunks(len(w.tokens))[:-1]:
            groups.append([(w, start, stop)])
            start = stop
        batches = ends.setdefault(id(w.session.context), [[]])
        if _n_rows(batches[-1]) + len(w.tokens) - start > w.session.context.n_batch:
            batches.append([])
        batches[-1].append((w, start, len(w.tokens)))
    return groups + [batch for batches in ends.values() for batch in batches if batch]


def _n_rows(group: list[tuple[Work, int, int]]) -> int:
    return sum(stop - start for _, start, stop in group)


def _joined(pieces: list[NDArray[np.float32]], n_vocab: int) -> NDArray[np.float32]:
    filled = [piece for piece in pieces if len(piece)]
    if len(filled) == 1:
        return filled[0]
    return np.concatenate(filled) if filled else np.empty((0, n_vocab), np.float32)
