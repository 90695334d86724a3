"""How many tokens a session holds: bookkeeping for every runtime whose sessions count their own KV cache.

A session keeps a SessionState in its attribute `state`. A forward goes through three steps:

    checked = check_items(items, model, limits)  # all items are checked before anything is evaluated (requests.py)
    state.begin(checked[0])                      # what lies beyond n_past is dropped
    state.advance(n)                             # n more rows are evaluated; of a chain as often as it takes

Whatever is raised between two of these calls, the session holds the rows that were counted, and no others.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import ContextFullError, RequestError, SessionError, counted
from edgedec.model import ALL_LAYERS, RowGroup


@dataclass(slots=True)
class CheckedItem:
    """A ForwardItem in which everything was found to be in order, with its defaults filled in.

    Attributes:
        session: The session of the runtime's own class that the rows are evaluated in.
        n_past: Cached tokens that the rows build on.
        groups: The rows, in arrays of the types that ForwardItem names; where rows leave early, the span's `layers`
            say so, and its `leave` is None.
        n_rows: How many rows are evaluated.
        parents: int32[n_rows] where some rows are a tree, None for a chain.
        logit_rows: int32, the rows whose logits are returned, ascending.
        taps: The layers whose output is returned for every row.
        mass: By layer f32[n_rows], what the attention of each row is multiplied by, to be added up.
        positions: int32[n_rows], the position of each row; None where they follow what is there.
        is_special: Whether it is more than tokens through all layers: a chain, or a tree.
    """

    session: Any
    n_past: int
    groups: tuple[RowGroup, ...]
    n_rows: int
    parents: NDArray[np.int32] | None
    logit_rows: NDArray[np.int32]
    taps: tuple[int, ...] = ()
    mass: Mapping[int, NDArray[np.float32]] = field(default_factory=dict)
    positions: NDArray[np.int32] | None = None
    is_special: bool = False

    @property
    def resumes(self) -> bool:
        """Whether some rows enter behind layer 0."""
        return self.is_special and any(group.span.enter for group in self.groups)

    def parts(self, begin: int, end: int) -> Iterator[tuple[RowGroup, int, int]]:
        """Yield each group that has some of the rows [begin, end), and which of the group's own rows these are."""
        first = 0
        for group in self.groups:
            n = group.n_rows
            if begin < first + n and first < end:
                yield group, max(begin - first, 0), min(end - first, n)
            first += n


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
        stop, written = item.n_past, self.written
        if len(item.groups) > 1:
            written = written[:, : item.n_past + item.n_rows].copy()
        for group in item.groups:
            first, layers = group.span.enter, group.span.layers
            for i in range(first, len(written)):
                holes = np.flatnonzero(~written[i, :stop])
                if len(holes) and (layers is None or layers.attn[i]):
                    raise SessionError(
                        f"layer {i} has no keys and values at position {holes[0]}: the forward that put this token "
                        f"there left the layer out; go back to n_past {holes[0]}, or leave the layer out again"
                    )
            if len(item.groups) > 1:
                written[first:, stop : stop + group.n_rows] = True if layers is None else layers.attn[first:, None]
            stop += group.n_rows

    def begin(self, item: CheckedItem) -> None:
        """Begin a forward: drop what lies beyond its n_past.

        Rows that enter behind layer 0 complete those whose lower layers an earlier forward evaluated: the keys and
        values of these layers stay.
        """
        n_past, end, resumes = item.n_past, item.n_past + item.n_rows, item.resumes
        self.n_cached, self.tree, self._current = n_past, None, item
        if n_past < self._n_written:
            if resumes:
                start = n_past
                for group in item.groups:
                    self.written[group.span.enter :, start : start + group.n_rows] = False
                    start += group.n_rows
                self.written[:, end : self._n_written] = False
            else:
                self.written[:, n_past : self._n_written] = False
            self._n_written = min(self._n_written, end if resumes else n_past)
        if n_past < self.n_whole:
            self.n_whole = n_past
        if self._has_places or item.positions is not None or self.places is not None:
            self._place(item)

    def next_place(self, n_past: int) -> int:
        """Return the time, height and width of a text's row behind the first `n_past` rows."""
        if self.places is None or n_past == 0:
            return n_past
        return int(self.places[n_past - 1].max()) + 1

    def drop_part_of_block(self) -> None:
        """Count the rows of a block as dropped where the last forward has left only a part of it."""
        item = self._current
        block = None if item is None else item.groups[0].block
        if self.places is not None and item is not None and block is not None:
            n = block.first + self.n_cached - item.n_past
            if n < block.n_rows:
                self.n_cached = self.n_whole = self.n_cached - n

    def held_places(self, n: int) -> NDArray[np.int32]:
        """Return int32[n, 3], the places of the first `n` slots."""
        return _as_places(np.arange(n, dtype=np.int32)) if self.places is None else self.places[:n]

    def _place(self, item: CheckedItem) -> None:
        """Note the places of the rows of a forward that begins, but for those that an earlier one has placed.

        A text's row stands one place behind the farthest place before it. A block stands there, too; its rows have that
        time, and are placed by their rows and columns of its grid from there on.
        """
        n_past, placed = item.n_past, [group for group in item.groups if not group.span.enter]
        if n_past == 0 and len(placed) == len(item.groups):
            self.places = None
        if self.places is None:
            if item.positions is None and all(group.tokens is not None or group.block is None for group in placed):
                return
            self.places = np.zeros((self.n_ctx, 3), np.int32)
            self.places[:n_past] = _as_places(np.arange(n_past, dtype=np.int32))
        start = n_past
        for group in item.groups:
            if not group.span.enter:
                self._place_group(item, group, start)
            start += group.n_rows

    def _place_group(self, item: CheckedItem, group: RowGroup, start: int) -> None:
        """Note the places of the rows of a group, whose first slot is `start`."""
        assert self.places is not None, "some rows don't stand at their slot's number"
        n, block = group.n_rows, group.block if group.tokens is None else None
        to = self.places[start : start + n]
        if block is not None:
            time = int(self.places[start - 1, 0]) if block.first else self.next_place(start)
            rows = np.arange(block.first, block.first + n)
            to[:, 0], to[:, 1], to[:, 2] = time, time + rows // block.n_x, time + rows % block.n_x
        elif item.positions is not None:
            to[:] = item.positions[start - item.n_past :][:n, None]
        elif item.parents is None:
            to[:] = self.next_place(start) + np.arange(n)[:, None]
        else:
            for row, parent in enumerate(item.parents[start - item.n_past :][:n].tolist()):
                to[row] = self.next_place(item.n_past + parent + 1)

    def advance(self, n: int) -> None:
        """Count the next `n` rows of the forward as evaluated; of a tree all rows at once.

        Rows of a chain are cached from now on. After a tree the session is branched: one path of it can be kept.
        """
        item = self._current
        assert item is not None, "no forward was begun"
        start, stop = self.n_cached, self.n_cached + n
        is_whole = not item.is_special or all(group.span == ALL_LAYERS for group in item.groups)
        if is_whole:
            self._by_slot[start:stop] = True
        else:
            slot = start
            for group, begin, end in item.parts(start - item.n_past, stop - item.n_past):
                first, layers = group.span.enter, group.span.layers
                to = self.written[first:, slot : slot + end - begin]
                to[:] = True if layers is None else layers.attn[first:, None]
                slot += end - begin
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
