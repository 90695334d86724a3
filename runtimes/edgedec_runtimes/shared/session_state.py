"""How many tokens a session holds: bookkeeping for every runtime whose sessions count their own KV cache.

A session keeps a SessionState in its attribute `state`. A forward goes through three steps:

    checked = check_items(items, model, limits)  # all items are checked before anything is evaluated (requests.py)
    state.begin(checked[0])                      # what lies beyond n_past is dropped
    state.advance(n)                             # n more rows are evaluated; of a chain as often as it takes

Whatever is raised between two of these calls, the session holds the rows that were counted, and no others.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ContextFullError, RequestError, SessionError, counted
from edgedec.model import LayerSet
from edgedec.pictures import Block


@dataclass(slots=True)
class CheckedItem:
    """A ForwardItem in which everything was found to be in order, with its defaults filled in.

    Attributes:
        session: The session of the runtime's own class that the rows are evaluated in.
        n_past: Cached tokens that the rows build on.
        tokens: int32[n_rows], or None where `hidden` is given.
        hidden: f32[n_rows, n_embd], or None. In place of embeddings, a multiple of n_embd numbers each.
        n_rows: How many rows are evaluated.
        first_layer: The first layer that runs.
        parents: int32[n_rows] for a tree, None for a chain.
        layers: The layers that run, or None for all.
        wanted: int32, the rows whose logits are returned, ascending.
        taps: The layers whose output is returned for every row.
        is_special: Whether it begins with hidden states, leaves layers out, has taps or wants attention's mass.
        block, first: The picture's block that the rows belong to, or None, and the number of the first row in it.
        mass: Layers, and f32[n_rows] to multiply the attention of each row by, to be added up; None for none.
        positions: int32[n_rows], the position of each row; None where they follow what is there.
    """

    session: Any
    n_past: int
    tokens: NDArray[np.int32] | None
    hidden: NDArray[np.float32] | None
    n_rows: int
    first_layer: int
    parents: NDArray[np.int32] | None
    layers: LayerSet | None
    wanted: NDArray[np.int32]
    taps: tuple[int, ...]
    is_special: bool
    block: Block | None = None
    first: int = 0
    mass: tuple[tuple[int, ...], NDArray[np.float32]] | None = None
    positions: NDArray[np.int32] | None = None


class SessionState:
    """How many tokens a session holds, which layers hold them, and the tree that the last forward left.

    Attributes:
        n_ctx: Most tokens.
        n_cached: Tokens cached; the token at position i lies in slot i, and row j of a tree in slot n_cached + j.
        n_whole: How many slots, from the first one, hold keys and values of every layer.
        written: bool[n_layer, n_ctx], whether a slot holds a layer's keys and values of a counted row.
        tree: The last forward where that was a tree of which no path was kept yet, or None.
        is_closed: Whether close() was called.
        places: int32[n_ctx, 3], the time, height and width that the row in each written slot turns to; None while they
            are the slot's number, as they are without pictures and positions of their own.
    """

    def __init__(self, n_ctx: int, n_layer: int, *, has_places: bool = False) -> None:
        self.n_ctx = n_ctx
        self.n_cached = 0
        self.n_whole = 0
        self._by_slot = np.zeros((n_ctx, n_layer), dtype=np.bool_)  # a slot's layers lie together: a row writes them
        self.written = self._by_slot.T
        self.tree: CheckedItem | None = None
        self.is_closed = False
        self.places: NDArray[np.int32] | None = None
        self._has_places = has_places
        self._n_written = 0  # no layer has written a slot from here on
        self._current: CheckedItem | None = None

    def check_open(self) -> None:
        """Raise SessionError once the session is closed."""
        if self.is_closed:
            raise SessionError("the session is closed; open another with model.session()")

    def check_settled(self, action: str) -> None:
        """Raise SessionError when the session is closed or branched, so that it can't be `action` ("forked")."""
        self.check_open()
        if self.tree is not None:
            raise SessionError(f"a branched session can't be {action}; call keep first")

    def check_past(self, n_past: int, n_rows: int) -> None:
        """Check that `n_rows` rows may follow the first `n_past` cached tokens.

        Raises:
            RequestError, SessionError, ContextFullError: As Session.forward raises them.
        """
        if self.is_closed:
            self.check_open()
        if n_past < 0:
            raise RequestError(f"n_past is {n_past}; it must be at least 0")
        if n_past > self.n_cached:
            branched = "" if self.tree is None else " (the last forward was a tree: call keep, or go back)"
            raise SessionError(f"n_past is {n_past}; the session holds {counted(self.n_cached, 'token')}{branched}")
        if n_past + n_rows > self.n_ctx:
            raise ContextFullError(
                f"{counted(n_past, 'cached token')} and {n_rows} new are over the session's {self.n_ctx}; "
                "open a session with a longer context"
            )

    def check_written(self, item: CheckedItem) -> None:
        """Raise SessionError where a row would read keys and values that no forward has written."""
        for i in range(item.first_layer, len(self.written)):
            holes = np.flatnonzero(~self.written[i, : item.n_past])
            if len(holes) and (item.layers is None or item.layers.attn[i]):
                raise SessionError(
                    f"layer {i} has no keys and values at position {holes[0]}: the forward that put this token there "
                    f"left the layer out; go back to n_past {holes[0]}, or leave the layer out again"
                )

    def begin(self, item: CheckedItem) -> None:
        """Begin a forward: drop what lies beyond its n_past.

        A forward that resumes after a layer completes rows whose lower layers an earlier forward evaluated: their keys
        and values in those layers stay.
        """
        n_past, end, first = item.n_past, item.n_past + item.n_rows, item.first_layer
        self.n_cached, self.tree, self._current = n_past, None, item
        if n_past < self._n_written:
            self.written[first:, n_past : self._n_written] = False
            self.written[:, end : self._n_written] = False
            self._n_written = min(self._n_written, end if first else n_past)
        if n_past < self.n_whole:
            self.n_whole = n_past
        if not first and (self._has_places or item.positions is not None or self.places is not None):
            self._place(item)

    def next_place(self, n_past: int) -> int:
        """Return the time, height and width of a text's row behind the first `n_past` rows."""
        if self.places is None or n_past == 0:
            return n_past
        return int(self.places[n_past - 1].max()) + 1

    def drop_part_of_block(self) -> None:
        """Count the rows of a block as dropped where the last forward has left only a part of it."""
        item = self._current
        if self.places is not None and item is not None and item.block is not None:
            n = item.first + self.n_cached - item.n_past
            if n < item.block.n_rows:
                self.n_cached = self.n_whole = self.n_cached - n

    def held_places(self, n: int) -> NDArray[np.int32]:
        """Return int32[n, 3], the places of the first `n` slots."""
        return _as_places(np.arange(n, dtype=np.int32)) if self.places is None else self.places[:n]

    def _place(self, item: CheckedItem) -> None:
        """Note the places of the rows of a forward that begins.

        A text's row stands one place behind the farthest place before it. A block stands there, too; its rows have that
        time, and are placed by their rows and columns of its grid from there on.
        """
        n_past, n, block = item.n_past, item.n_rows, item.block if item.tokens is None else None
        if n_past == 0:
            self.places = None
        if self.places is None:
            if block is None and item.positions is None:
                return
            self.places = np.zeros((self.n_ctx, 3), np.int32)
            self.places[:n_past] = _as_places(np.arange(n_past, dtype=np.int32))
        to = self.places[n_past : n_past + n]
        if block is not None:
            start = int(self.places[n_past - 1, 0]) if item.first else self.next_place(n_past)
            rows = np.arange(item.first, item.first + n)
            to[:, 0], to[:, 1], to[:, 2] = start, start + rows // block.n_x, start + rows % block.n_x
            return
        if item.positions is not None:
            to[:] = item.positions[:, None]
            return
        depths = np.arange(n)
        for row, parent in enumerate(() if item.parents is None else item.parents.tolist()):
            depths[row] = depths[parent] + 1 if parent >= 0 else 0
        to[:] = self.next_place(n_past) + depths[:, None]

    def advance(self, n: int) -> None:
        """Count the next `n` rows of the forward as evaluated; of a tree all rows at once.

        Rows of a chain are cached from now on. After a tree the session is branched: one path of it can be kept.
        """
        item = self._current
        assert item is not None, "no forward was begun"
        start, stop = self.n_cached, self.n_cached + n
        first, layers = item.first_layer, item.layers
        is_whole = layers is None and first == 0
        if is_whole:
            self._by_slot[start:stop] = True
        else:
            self.written[first:, start:stop] = True if layers is None else layers.attn[first:, None]
        if stop > self._n_written:
            self._n_written = stop
        if self.n_whole >= start and (is_whole or self.written[:, start:stop].all()):
            self.n_whole = stop
        if item.parents is None:
            self.n_cached = stop
        else:
            self.tree = item

    def leave_tree(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        """Drop the tree, and return the slots that its path `rows` lies in, int32[n].

        The caller moves their keys and values to the slots from n_cached on, and then calls hold_path().

        Raises:
            SessionError: There is no tree.
            RequestError: `rows` is no path from the root. Nothing has changed.
        """
        self.check_open()
        if self.tree is None or self.tree.parents is None:
            raise SessionError("keep() follows a forward with parents; there was none, or a path was kept already")
        path, parents = np.asarray(rows).tolist(), self.tree.parents.tolist()
        for previous, row in zip([-1, *path], path, strict=False):
            if not isinstance(row, int) or not 0 <= row < len(parents) or parents[row] != previous:
                raise RequestError(f"rows {path} are no path from the root of the last tree")
        self.tree = None
        return self.n_cached + np.array(path, dtype=np.int32)

    def hold_path(self, slots: NDArray[np.int32]) -> None:
        """Count what was moved from `slots` as cached."""
        stop = self.n_cached + len(slots)
        self._by_slot[self.n_cached : stop] = self._by_slot[slots]
        if self.places is not None:
            self.places[self.n_cached : stop] = self.places[slots]
        self._by_slot[stop : self._n_written] = False
        self.n_cached = self._n_written = stop
        self.n_whole = min(self.n_whole, stop)

    def restore(
        self, n_tokens: int, written: NDArray[np.bool_] | Literal[True], places: NDArray[np.int32] | None = None
    ) -> None:
        """Hold `n_tokens` tokens; bool[n_layer, n_tokens], or True, says which layers have written them.

        `places` are those of held_places(); None where they are the slots' numbers.
        """
        self.places = None
        if places is not None and (places != _as_places(np.arange(n_tokens, dtype=np.int32))).any():
            self.places = np.zeros((self.n_ctx, 3), np.int32)
            self.places[:n_tokens] = places
        self.n_cached, self.tree = 0, None
        self.written[:, :n_tokens] = written
        self.written[:, n_tokens:] = False
        self.n_cached = self._n_written = n_tokens
        self.n_whole = int(np.logical_and.accumulate(self.written[:, :n_tokens].all(axis=0)).sum())

    def close(self) -> None:
        """Hold nothing any more, and refuse every later use."""
        self.is_closed, self.n_cached, self.tree, self._current = True, 0, None, None


def _as_places(positions: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return int32[n, 3], the places of rows of a text at these positions."""
    return np.repeat(positions[:, None], 3, axis=1)
