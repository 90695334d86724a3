"""The forwards of denoising: which rows a pass evaluates, where their keys and values lie, and the rows it looks at."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from edgedec.logit_ops import LogitOps
from edgedec.model import Forward, ForwardItem, RowGroup, Session
from edgedec.pictures import Block
from edgedec.progress import OnProgress, report_progress
from edgedec.sessions.text_pages import PAGE_TOKENS, n_pages
from edgedec_methods.diffusion.in_front import in_front
from edgedec_methods.diffusion.rules import Canvas, Layout, Pass

_TIMED, _LEAST_PASSES = 5, 8  # forwards of one row, each behind a text of so many passes
F32 = NDArray[np.float32]
Looked = tuple[F32, LogitOps]
"""The rows of masked positions, and the operations on them."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a model's file says (ModelCard.methods).

    Attributes:
        mask: The mask token.
        shift: Whether a row is of the position behind it.
        most_rows: Most rows that see each other.
        kept_rows: Rows of logits that memory plans count.
        block: Positions of a block; None where rows see the whole text.
        window: Positions that are denoised together where rows see only what lies before them; else None.
    """

    mask: int
    shift: bool
    most_rows: int
    kept_rows: int
    block: int | None = None
    window: int | None = None


@dataclass(slots=True)
class Opened:
    """The block that is being denoised.

    Attributes:
        start, end: Its positions.
        n_known: How many of them the text had when the block was opened; where the rule revises, how many it has.
        ids: Their tokens, the mask where none is committed.
        is_end: Whether a token ends a text.
        rows: By committed position, the row that its token is drawn from.
        before: The row in front of the block, where that says what stands at its first position.
        ahead: The rows of later states of the block, by the tokens of the state; they were evaluated early.
        forks: The sessions that such states are evaluated on.
        revises: Whether passes look at committed positions, too.
        is_done: Whether the block may be shown. A rule that revises has to pass over it once without a change.
    """

    start: int
    end: int
    n_known: int
    ids: list[int]
    is_end: Callable[[int], bool]
    rows: dict[int, F32] = field(default_factory=dict)
    passes: list[Pass] = field(default_factory=list)
    before: F32 | None = None
    ahead: dict[tuple[int, ...], Looked] = field(default_factory=dict)
    forks: list[Session] = field(default_factory=list)
    revises: bool = False
    is_done: bool = True

    def masked(self, ids: Sequence[int], mask: int) -> NDArray[np.int64]:
        """Return the masked positions where the block's tokens are `ids`, in front of a committed end if there are any.

        Where the rule revises, they are all positions that were not shown, up to a committed end.

        What stands behind an end is not needed: Learn2PD's end-of-text prediction, without a threshold.
        """
        new = ids[self.n_known :]  # a prompt may hold the mask token, and ends
        places = np.flatnonzero(np.array(new) == mask)
        end = next((i for i, token in enumerate(new) if token != mask and self.is_end(token)), len(new))
        if self.revises:
            return self.start + self.n_known + np.arange(min(end + 1, len(new)))
        inside = places[places < end]
        return self.start + self.n_known + (inside if len(inside) else places)

    def close(self) -> None:
        """Close the forks."""
        for fork in self.forks:
            fork.close()


class Forwards:
    """The forwards over one text.

    Args:
        inner: The session that evaluates.
        facts: What the model's file says.
        layout: What a pass evaluates where rows see the whole text; None for everything.
        n_ahead: How many later states of a block are evaluated beside the current one.

    Attributes:
        n_clean: How many positions have keys and values of the text's own tokens, in whole blocks.
        n_passes, n_rows: Forwards of passes, and rows of all forwards, since begin().
        n_narrow: How many passes had no room for a state ahead that was asked for.
    """

    def __init__(self, inner: Session, facts: Facts, layout: Layout | None, n_ahead: int) -> None:
        self._inner, self._facts, self._n_ahead = inner, facts, n_ahead
        is_causal = facts.window is not None
        self._layout = in_front if is_causal else layout
        self._grid = None if is_causal else Block(facts.block or facts.most_rows, 1, 1, mutual=True)
        self._held: list[tuple[int, int]] = []  # with a layout: the position and the token of each slot
        self._costs: list[float] = []  # by text, passes in forwards of one row
        self.n_clean = 0
        self.begin()

    def begin(self) -> None:
        """Count from 0, as a text begins."""
        self.n_passes = self.n_rows = self.n_narrow = 0
        self._pass_s: list[float] = []

    def go_on_from(self, other: "Forwards") -> None:
        """Take over what another session has evaluated, of which this one's is a fork."""
        self.n_clean, self._held = other.n_clean, list(other._held)

    def forget(self, n_text: int) -> None:
        """Count what is behind the first `n_text` positions as not evaluated."""
        if self._facts.block:
            self.n_clean = min(self.n_clean, n_text // self._facts.block * self._facts.block)

    def forget_all(self) -> None:
        """Count no position as evaluated."""
        self.n_clean, self._held = 0, []

    def looked(self, text: Sequence[int], opened: Opened, end: int, on_progress: OnProgress | None) -> Looked:
        """Return the rows of logits of the open block's masked positions, after the forwards that they need.

        Args:
            text: The tokens so far; those of the open block are the block's.
            opened: The block.
            end: Where the last position that may be written ends.
            on_progress: Called while a long prompt is read, with how much of it was.
        """
        forward = opened.ahead.get(tuple(opened.ids))
        if forward is not None:
            return forward
        self.n_passes += 1
        if self._layout is not None:
            return self._laid_out(self._layout, text, opened, end)
        return self._in_order(text, opened, end, on_progress)

    def _laid_out(self, layout: Layout, text: Sequence[int], opened: Opened, end: int) -> Looked:
        """Evaluate positions in the order of a layout."""
        mask, start = self._facts.mask, opened.start
        places = opened.masked(opened.ids, mask)
        n_behind = 0 if self._facts.window else max(0, end - opened.end)
        ids = [*text[:start], *opened.ids, *[mask] * n_behind]
        row_places = (places - self._facts.shift).tolist()
        held = [place for place, token in self._held if place < len(ids) and ids[place] == token]
        passes = len(opened.passes)
        canvas = Canvas(ids, start, opened.end, places.tolist(), frozenset(row_places), passes, held)
        n_kept, fresh = layout(canvas)
        n_past = 0
        while n_past < min(len(n_kept), len(self._held)) and self._held[n_past] == (
            n_kept[n_past],
            ids[n_kept[n_past]],
        ):
            n_past += 1
        order = n_kept[n_past:] + fresh
        row_of = {place: row for row, place in enumerate(order)}
        rows = np.array([row_of[place] for place in row_places])
        tokens, at = np.array([ids[place] for place in order], np.int32), np.array(order, np.int32)
        before, self._held = self._held[:n_past], []
        ascending = np.sort(rows).astype(np.int32)
        item = ForwardItem(self._inner, n_past, (RowGroup(tokens, sees=self._grid, positions=at),), ascending)
        forward = self._evaluated([item])[0]
        self._held = before + list(zip(order, tokens.tolist(), strict=True))
        return forward.logits[np.searchsorted(ascending, rows)], forward.ops

    def _in_order(self, text: Sequence[int], opened: Opened, end: int, on_progress: OnProgress | None) -> Looked:
        """Evaluate what lacks keys and values, and the open block."""
        facts, start = self._facts, opened.start
        size, places = facts.block or facts.most_rows, opened.masked(opened.ids, facts.mask)
        first = 0 if facts.block is None else self.n_clean
        if facts.block is not None and facts.shift and places[0] == start and opened.before is None:
            first = min(first, start - size)
        while opened.end - first > facts.most_rows:
            n = min(facts.most_rows // size * size, start - first)
            self._evaluated([self._item(self._inner, text[first : first + n], first, places[:0])])
            self.n_clean = first = first + n
            report_progress(on_progress, "prefill", first, start, "tokens")
        behind = [facts.mask] * (0 if facts.block else end - opened.end)
        states = [opened.ids, *(self._states_ahead(opened, opened.end - first) if first in (0, start) else [])]
        masked = [opened.masked(ids, facts.mask) for ids in states]
        items = [
            self._item(session, [*text[first:start], *ids, *behind], first, rows - facts.shift - first)
            for session, ids, rows in zip(
                [self._inner, *self._forks(opened, len(states) - 1)], states, masked, strict=True
            )
        ]
        forwards = self._evaluated(items)
        self.n_clean = start if facts.block else 0
        if facts.shift and places[0] == start and first < start:
            opened.before = forwards[0].logits[0].copy()
        looked = []
        for forward, rows in zip(forwards, masked, strict=True):
            logits = forward.logits if forward.is_own or len(items) == 1 else forward.logits.copy()  # they are kept
            if facts.shift and len(rows) > len(logits):
                assert opened.before is not None, "the first pass of a block evaluates the row before it"
                logits = np.concatenate([opened.before[None], logits])
            looked.append((logits, forward.ops))
        opened.ahead = dict(zip(map(tuple, states[1:]), looked[1:], strict=True))
        return looked[0]

    def _states_ahead(self, opened: Opened, n_rows: int) -> list[list[int]]:
        """Return what the block becomes in later passes, if each commits the most confident token of the latest one.

        A state is a fork with `n_rows` rows. Memory plans don't count states. So there are only as many as fit into
        what is planned anyway: the rest of the context, the rows of a forward, and the rows of logits that are free.
        """
        if not self._n_ahead or not opened.passes:
            return []
        latest, ids = opened.passes[-1], list(opened.ids)
        pages_bytes = PAGE_TOKENS * n_pages(opened.end - n_rows, opened.end)
        room = min(self._n_ahead, (self._inner.n_ctx - opened.end) // pages_bytes, self._facts.most_rows // n_rows - 1)
        n_masked = ids.count(self._facts.mask)
        n_logits = self._facts.kept_rows - len(opened.rows) - n_masked
        states: list[list[int]] = []
        for i in np.argsort(-latest.confidences, kind="stable").tolist():
            if ids[place := int(latest.places[i])] != self._facts.mask:
                continue
            ids[place] = int(latest.tokens[i])
            n_masked -= 1
            n_logits -= 2 * n_masked  # what a forward returned, and a copy
            if len(states) >= room or n_logits < 0 or not n_masked:
                break
            states.append(list(ids))
        self.n_narrow += not states and opened.ids.count(self._facts.mask) > 1
        return states

    def _forks(self, opened: Opened, n: int) -> list[Session]:
        """Return `n` sessions beside the inner one, for states ahead; they live as long as the block."""
        while len(opened.forks) < n:
            opened.forks.append(self._inner.fork())
        return opened.forks[:n]

    def _item(self, session: Session, ids: Sequence[int], n_past: int, rows: NDArray[np.int64]) -> ForwardItem:
        row_numbers = rows[rows >= 0].astype(np.int32)
        return ForwardItem(session, n_past, (RowGroup(np.array(ids, np.int32), sees=self._grid),), row_numbers)

    def cost(self) -> float | None:
        """Return how many forwards of one row a pass takes as long as; None where that is not known.

        It is the median of texts, each timed by a forward of one row right behind it, so that both found the machine
        alike. Those are few, and there is none behind a short text: they must not cost time.
        """
        n_past = self._inner.n_cached - 1
        if len(self._costs) < _TIMED and len(self._pass_s) >= _LEAST_PASSES and n_past >= self.n_clean:
            del self._held[n_past:]
            group = RowGroup(np.array([self._facts.mask], np.int32))
            item = ForwardItem(self._inner, n_past, (group,), np.zeros(1, np.int32))
            self._costs.append(median(self._pass_s) / self._timed([item])[1])
        return median(self._costs) if self._costs else None

    def _evaluated(self, items: list[ForwardItem]) -> list[Forward]:
        forwards, seconds = self._timed(items)
        self._pass_s += [seconds] if len(items[0].rows) else []  # without rows, a prompt is read
        self.n_rows += sum(item.n_rows for item in items)
        return forwards

    def _timed(self, items: list[ForwardItem]) -> tuple[list[Forward], float]:
        begun = perf_counter()
        forwards = [self._inner.evaluate(items[0])] if len(items) == 1 else self._inner.model.forward(items)
        return forwards, perf_counter() - begun
