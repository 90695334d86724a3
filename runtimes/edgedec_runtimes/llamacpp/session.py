"""One sequence in a context."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import (
    CapabilityError,
    ContextFullError,
    ModelFormatError,
    RequestError,
    SessionError,
)
from edgedec.model import Forward, ForwardItem
from edgedec.progress import OnProgress
from edgedec.sessions.item_session import ItemSession
from edgedec_runtimes.llamacpp.context import N_UBATCH, Context, Part

if TYPE_CHECKING:
    from edgedec_runtimes.llamacpp.model import LlamaCppModel


P = ParamSpec("P")
R = TypeVar("R")


def _exclusive(
    method: Callable[Concatenate["LlamaCppSession", P], R],
) -> Callable[Concatenate["LlamaCppSession", P], R]:
    """Let a method run only while no other call touches the model's native state."""

    @wraps(method)
    def run(session: "LlamaCppSession", /, *args: P.args, **kwargs: P.kwargs) -> R:
        with session.model.lock:
            return method(session, *args, **kwargs)

    return run


@dataclass(frozen=True, slots=True)
class Branch:
    """The tree that the last forward left behind: its rows, and for each row a sequence id that holds its path."""

    n_past: int
    tokens: NDArray[np.int32]
    parents: list[int]
    holder: list[int]
    scratch: tuple[int, ...]


class LlamaCppSession(ItemSession):
    """Implements edgedec.model.Session: sequence id `sequence` of a context."""

    def __init__(
        self, model: "LlamaCppModel", context: Context, sequence: int, n_ctx: int, *, is_fork: bool = False
    ) -> None:
        self.is_fork = is_fork
        self._model = model
        self._context = context
        self._sequence = sequence
        self._n_ctx = n_ctx
        self._n_cached = 0
        self._branch: Branch | None = None
        self._closed = False

    @property
    def model(self) -> "LlamaCppModel":
        """The model this session belongs to."""
        return self._model

    @property
    def context(self) -> Context:
        """The context whose sequence this is."""
        return self._context

    @property
    def n_ctx(self) -> int:
        """Most tokens that the session can hold."""
        return self._n_ctx

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache."""
        return self._n_cached

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None) -> Forward:
        """Evaluate an item; see edgedec.model.Session."""
        return self._model.forward_with_progress([item], on_progress)[0]

    def exact_rows(self, n_past: int) -> int | None:
        """Return how many rows may be bit-equal to single steps; see edgedec.model.Session."""
        return self._model.exact.limit(n_past)

    def has_exact_rows(self, n_past: int, n_rows: int) -> bool:
        """Tell whether so many rows are bit-equal to single steps; see edgedec.model.Session."""
        return self._model.exact.holds(self, n_past, n_rows)

    def check(self, item: ForwardItem) -> NDArray[np.int32]:
        """Return the item's tokens; raise when it can't be evaluated. Changes nothing."""
        if self._closed:
            raise SessionError("the session is closed; open another with model.session()")
        if item.hidden is not None or item.resume_after is not None:
            raise CapabilityError("the llamacpp runtime cannot start from hidden states")
        if item.layers is not None or item.taps:
            raise CapabilityError("the llamacpp runtime cannot skip layers or return hidden states")
        if item.tokens is None or not len(item.tokens):
            raise RequestError("a forward needs at least one token")
        tokens = np.ascontiguousarray(item.tokens, dtype=np.int32)
        n_vocab = self._model.card.n_vocab
        if tokens.ndim != 1 or int(tokens.min()) < 0 or int(tokens.max()) >= n_vocab:
            raise RequestError(f"tokens must be one-dimensional ids from 0 to {n_vocab - 1}")
        self._check_past(item.n_past)
        if item.n_past + len(tokens) > self._n_ctx:
            raise ContextFullError(
                f"{item.n_past} cached tokens and {len(tokens)} new ones are over the session's {self._n_ctx}"
            )
        return tokens

    def _check_past(self, n_past: int) -> None:
        highest = self._n_cached if self._branch is None else self._branch.n_past
        if not 0 <= n_past <= highest:
            branched = "" if self._branch is None else " (the last forward was a tree: call keep, or go back)"
            raise SessionError(f"n_past is {n_past}; the session holds {highest} tokens to build on{branched}")
        if n_past not in (0, highest) and not self._model.capabilities.rollback:
            raise CapabilityError(f"this model's state can't go back: n_past may be {highest} or 0, found {n_past}")

    def rewind(self, n_past: int) -> None:
        """Drop everything beyond `n_past`, the branches of a tree included."""
        self._drop_branch()
        if n_past < self._n_cached:
            self._context.remove(self._sequence, n_past)
            self._n_cached = n_past

    def chain_part(self, tokens: NDArray[np.int32], start: int, wanted: NDArray[np.bool_]) -> Part:
        """Return the rows of a chain whose first token stands at position `start`."""
        positions = np.arange(start, start + len(tokens), dtype=np.int32)
        return Part(tokens, positions, (self._sequence,), wanted)

    def tree_part(self, tokens: NDArray[np.int32], parents: NDArray[np.int32], wanted: NDArray[np.bool_]) -> Part:
        """Return the rows of a tree: a sequence id for every leaf's path, shared nodes carrying several."""
        n = len(tokens)
        depth = np.zeros(n, dtype=np.int32)
        parent_of = [int(parent) for parent in parents]
        for row, parent in enumerate(parent_of):
            depth[row] = depth[parent] + 1 if parent >= 0 else 0
        leaves = sorted(set(range(n)) - set(parent_of))
        scratch = self._model.take_sequences(self._context, len(leaves))
        members: list[list[int]] = [[] for _ in range(n)]
        for leaf, sequence in zip(leaves, scratch, strict=True):
            row = leaf
            while row >= 0:
                members[row].append(sequence)
                row = parent_of[row]
            if self._n_cached:
                self._context.copy(self._sequence, sequence)
        holder = [ids[0] for ids in members]
        self._branch = Branch(self._n_cached, tokens, parent_of, holder, scratch)
        positions = np.int32(self._n_cached) + depth
        return Part(tokens, positions.astype(np.int32), [tuple(ids) for ids in members], wanted)

    def advance(self, n_rows: int) -> None:
        """Count rows of a chain that were evaluated."""
        self._n_cached += n_rows

    def abandon(self) -> None:
        """Drop what a failed decode may have left beyond the cached tokens."""
        self._drop_branch()
        if self._n_cached == 0 or not self._context.remove(self._sequence, self._n_cached):
            self._context.remove(self._sequence, -1)
            self._n_cached = 0

    @_exclusive
    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep one path of the last tree.

        llama.cpp's attention adds up in the order of the cache's cells, and a node after a rejected one does not
        stand where a chain would have put it. Such nodes are evaluated again, so that the bits stay a chain's.
        """
        branch = self._branch
        if branch is None:
            raise SessionError("keep() follows a forward with parents; there was none")
        path = [int(row) for row in rows]
        for previous, row in zip([-1, *path], path, strict=False):
            if not 0 <= row < len(branch.parents) or branch.parents[row] != previous:
                raise RequestError(f"rows {path} are no path from the root of the last tree")
        n_ordered = next((i for i, row in enumerate(path) if row != i), len(path))
        if n_ordered:
            stop = branch.n_past + n_ordered
            self._context.copy(branch.holder[n_ordered - 1], self._sequence, branch.n_past, stop)
            self._n_cached = stop
        self._drop_branch()
        self._model.evaluate_again(self, branch.tokens[path[n_ordered:]])

    def _drop_branch(self) -> None:
        if self._branch is not None:
            for sequence in self._branch.scratch:
                self._context.remove(sequence, -1)
            self._model.give_sequences(self._context, self._branch.scratch)
            self._branch = None

    @_exclusive
    def fork(self) -> "LlamaCppSession":
        """Open a session that shares the cached prefix."""
        self._model.capabilities.require("fork", "llamacpp")
        if self._closed or self._branch is not None:
            raise SessionError("a session that is closed or branched can't be forked; call keep first")
        (sequence,) = self._model.take_sequences(self._context, 1)
        twin = LlamaCppSession(self._model, self._context, sequence, self._n_ctx, is_fork=True)
        if self._n_cached:
            self._context.copy(self._sequence, sequence)
        twin._n_cached = self._n_cached
        self._model.adopt(twin)
        return twin

    @_exclusive
    def save(self) -> bytes:
        """Serialize the cached KV."""
        if self._closed or self._branch is not None:
            raise SessionError("a session that is closed or branched can't be saved; call keep first")
        return self._context.save(self._sequence)

    @_exclusive
    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned."""
        if self._closed:
            raise SessionError("the session is closed; open another with model.session()")
        if not 0 <= n_tokens <= self._n_ctx:
            raise ContextFullError(f"the saved state holds {n_tokens} tokens, the session {self._n_ctx}")
        self.rewind(0)
        if n_tokens and (
            not self._context.load(self._sequence, data) or self._context.last_position(self._sequence) != n_tokens - 1
        ):
            self._context.remove(self._sequence, -1)
            raise ModelFormatError("the saved state does not fit this model, its options or this release")
        self._n_cached = n_tokens

    def cancel(self) -> None:
        """Stop the forward that is running; without one, nothing happens."""
        self._model.stop.cancel(self)

    @_exclusive
    def close(self) -> None:
        """Free the sequence; calling it again does nothing."""
        if not self._closed:
            self.rewind(0)
            self._closed = True
            self._model.release(self, self._sequence)


def prefill_chunks(n_rows: int) -> list[int]:
    """Return where the pieces end in which `n_rows` new rows are evaluated: every micro-batch.

    A prefill that starts at a multiple of the micro-batch is split where a cold start is, so a prefix reused up to
    such a border has a cold start's bits.

    >>> prefill_chunks(1200), prefill_chunks(8)
    ([512, 1024, 1200], [8])
    """
    return [*range(N_UBATCH, n_rows, N_UBATCH), n_rows]
