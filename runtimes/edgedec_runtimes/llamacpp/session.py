"""One sequence in a context."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ModelFormatError
from edgedec.model import RowGroup
from edgedec_runtimes.llamacpp.context import Part, Pool
from edgedec_runtimes.shared.measured_model import MeasuredModel, MeasuredSession
from edgedec_runtimes.shared.session_state import CheckedItem

_ADAPTED = b"edgedec: adapters "


@dataclass(frozen=True, slots=True)
class Branch:
    """The tree that the last forward left in the context.

    Attributes:
        tokens: int32[n], the token of each row.
        holder: For each row a sequence id that holds the row's path.
        scratch: The sequence ids that hold the tree, one for each leaf.
    """

    tokens: NDArray[np.int32]
    holder: list[int]
    scratch: tuple[int, ...]


class LlamaCppSession(MeasuredSession):
    """Implements edgedec.model.Session: one sequence id of a context.

    Attributes:
        pool: The context and its sequence ids.
        sequence: The sequence id.
    """

    def __init__(self, model: MeasuredModel[Any, Any], pool: Pool, sequence: int, n_ctx: int, n_reserved: int) -> None:
        """Take over an empty sequence of a context in which `n_reserved` cells are kept for the session."""
        super().__init__(model, n_ctx, n_layer=1)  # a forward runs all layers, so they are counted as one
        self.pool = pool
        self.sequence = sequence
        self._n_reserved = n_reserved
        self._branch: Branch | None = None

    def use_adapters(self) -> None:
        """Let the context have the session's adapters."""
        self.pool.context.use(self.scales)

    def _adapt(self) -> None:
        self._drop_branch()
        self.pool.context.remove(self.sequence, -1)

    def begin(self, item: CheckedItem) -> None:
        """Begin a forward: drop everything beyond its n_past, the branches of a tree included."""
        self._drop_branch()
        if item.n_past < self.n_cached:
            self.pool.context.remove(self.sequence, self.state.next_place(item.n_past))
        self.state.begin(item)

    def part(self, item: CheckedItem, start: int, stop: int, mask: NDArray[np.bool_]) -> Part:
        """Return rows [start, stop) of an item that was begun; of a tree all of them."""
        tokens = item.groups[0].tokens
        if tokens is None:
            return self._vector_part(item.groups[0], start, stop, mask)
        if item.parents is not None:
            return self._tree_part(tokens, item.parents.tolist(), mask)
        return self._chain_part(tokens[start:stop], self.state.next_place(self.n_cached), mask)

    def _vector_part(self, group: RowGroup, start: int, stop: int, mask: NDArray[np.bool_]) -> Part:
        assert group.vectors is not None, "the rows are vectors"
        n_past, n, places = self.n_cached, stop - start, self.state.places
        if not self._model.has_places:
            positions = np.arange(n_past, n_past + n, dtype=np.int32)
        else:
            held = self.state.held_places(n_past + n) if places is None else places
            positions = np.zeros((4, n), np.int32)
            positions[:3] = held[n_past : n_past + n].T
        mutual = group.block is not None and group.block.mutual
        vectors = np.ascontiguousarray(group.vectors[start:stop])
        return Part(None, positions.reshape(-1), (self.sequence,), mask, vectors, mutual)

    def _chain_part(self, tokens: NDArray[np.int32], position: int, mask: NDArray[np.bool_]) -> Part:
        positions = np.arange(position, position + len(tokens), dtype=np.int32)
        return Part(tokens, positions, (self.sequence,), mask)

    def _tree_part(self, tokens: NDArray[np.int32], parents: list[int], mask: NDArray[np.bool_]) -> Part:
        """Return the rows of a tree: each leaf's path has a sequence id of its own, and shared nodes carry several."""
        n = len(tokens)
        depth = np.zeros(n, dtype=np.int32)
        for row, parent in enumerate(parents):
            depth[row] = depth[parent] + 1 if parent >= 0 else 0
        leaves = sorted(set(range(n)) - set(parents))
        scratch = self.pool.take(len(leaves))
        members: list[list[int]] = [[] for _ in range(n)]
        for leaf, sequence in zip(leaves, scratch, strict=True):
            row = leaf
            while row >= 0:
                members[row].append(sequence)
                row = parents[row]
            if self.n_cached:
                self.pool.context.copy(self.sequence, sequence)
        self._branch = Branch(tokens, [ids[0] for ids in members], scratch)
        positions = np.int32(self.state.next_place(self.n_cached)) + depth
        return Part(tokens, positions, [tuple(ids) for ids in members], mask)

    def abandon(self) -> None:
        """Drop what a failed decode may have left beyond the cached tokens."""
        self._drop_branch()
        self.state.drop_part_of_block()  # whose rows have one time, so that llama.cpp can't drop some of them
        n_cached = self.n_cached
        if n_cached == 0 or not self.pool.context.remove(self.sequence, self.state.next_place(n_cached)):
            self.pool.context.remove(self.sequence, -1)
            self.state.n_cached = 0

    def _move(self, slots: NDArray[np.int32]) -> None:
        """Put the kept path of a tree behind the cached tokens.

        llama.cpp's attention adds up in the order of the cache's cells, and a node after a rejected one does not
        stand where a chain would have put it. Such nodes are evaluated again, in single steps, whose bits are always a
        chain's.
        """
        branch, n_past, path = self._branch, self.n_cached, (slots - self.n_cached).tolist()
        assert branch is not None, "a tree leaves a branch"
        n_ordered = next((i for i, row in enumerate(path) if row != i), len(path))
        first = self.state.next_place(n_past)
        if n_ordered:
            self.pool.context.copy(branch.holder[n_ordered - 1], self.sequence, first, first + n_ordered)
        self._drop_branch()
        no_row = np.zeros(1, dtype=np.bool_)
        try:
            self.use_adapters()
            for i in range(n_ordered, len(path)):
                token = branch.tokens[path[i] : path[i] + 1]
                self.pool.context.decode([self._chain_part(token, first + i, no_row)])
        except BaseException:
            self.abandon()
            raise

    def _drop_branch(self) -> None:
        if self._branch is not None:
            for sequence in self._branch.scratch:
                self.pool.context.remove(sequence, -1)
            self.pool.free_ids.extend(self._branch.scratch)
            self._branch = None

    def _fork(self) -> "LlamaCppSession":
        """Return a session that shares the cells of the cached prefix."""
        self._model.capabilities.require("fork", self._model.card.runtime)
        (sequence,) = self.pool.take(1)
        if self.n_cached:
            self.pool.context.copy(self.sequence, sequence)
        twin = LlamaCppSession(self._model, self.pool, sequence, self.n_ctx, 0)
        self._model.adopt(twin)
        return twin

    def save(self) -> bytes:
        """Serialize the cached KV; see edgedec.model.Session."""
        with self._model.lock:
            self.state.check_settled("saved")
            places = b"".join(array.tobytes() for array in self._places_kept(self.n_cached))
            return self._mark + places + self.pool.context.save(self.sequence)

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned; the session is empty after a ModelFormatError that names the release."""
        with self._model.lock:
            self.state.check_open()
            self._check_length(n_tokens)
            context = self.pool.context
            self._drop_branch()
            context.remove(self.sequence, 0)
            self.state.restore(0, True)
            mark, places, last = self._mark, None, n_tokens - 1
            is_ours = data.startswith(mark) if mark else not data.startswith(_ADAPTED)
            data = data[len(mark) :]
            if self._model.has_places and n_tokens and len(data) >= 12 * n_tokens:
                places = np.frombuffer(data, np.int32, 3 * n_tokens).reshape(n_tokens, 3)
                data, last = data[places.nbytes :], int(places[:, 0].max())
            if n_tokens and not (
                is_ours and context.load(self.sequence, data) and context.last_position(self.sequence) == last
            ):
                context.remove(self.sequence, -1)
                raise ModelFormatError(
                    "the saved state does not fit this model, its options or this release of llama.cpp; evaluate the "
                    "tokens again"
                )
            self.state.restore(n_tokens, True, places)

    @property
    def _mark(self) -> bytes:
        """What a saved state begins with where it was made with adapters: other scales can't go on from it."""
        return _ADAPTED + self._head(0) if any(self.scales) else b""

    def _arrays(self, n: int) -> NoReturn:
        raise NotImplementedError("llama.cpp writes saved states itself")

    def _take(self, arrays: Sequence[NDArray[Any]], n: int) -> NoReturn:
        raise NotImplementedError("llama.cpp reads saved states itself")

    def _free(self) -> None:
        self._drop_branch()
        self.pool.context.remove(self.sequence, -1)
        self.pool.release(self.sequence, self._n_reserved)
