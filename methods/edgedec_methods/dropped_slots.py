"""SpecKV: behind a long prompt, each head of each layer goes on with the slots that the latest rows attended to.

A few tokens are written with all slots (in the paper a draft model writes them). The attention of the last rows then
says what a slot is worth to a key-value head: the sum over its queries, and as much as the best slot around it, so words
stay whole. A second session holds the best slots of each head, at their positions, and steps read that one. The first
session keeps all slots for a chat's next turn.

Lossy: what was left out is not seen any more. The text depends on the model, the share, the prompt, the settings and
the seed, and on nothing else.

Paper: SpecKV, Galim et al. 2025, arXiv:2506.08373; without a draft model SnapKV, Li et al. 2024, arXiv:2404.14469
Option: `--method dropped-slots:0.1`
For: long texts behind prompts of 8,000 tokens and more
Measured: nothing yet
Status: opt-in
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from edgedec.errors import CapabilityError, ContextFullError, OptionError, argument
from edgedec.model import Forward, ForwardItem, RowGroup, Session
from edgedec.progress import OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sessions.joined_work import owned
from edgedec.sessions.outer_session import OuterSession, UnsavedSession
from edgedec.stats import DecodeStats
from edgedec_methods.sliding_window import tokens_of, with_tokens
from edgedec_runtimes.cpu.session import CpuSession

WINDOW, RECENT = 32, 8
"""Rows whose attention is heard at the first place, where their slots stay, and at a further one."""
POOL, SINKS, LEAST = 7, 4, 256
"""Slots that have the worth of the best one among them; first slots, which stay; the fewest slots that are seen."""
_NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class DroppedSlots:
    """Implements edgedec.companion.Companion, with the options of a method.

    Attributes:
        share: The share of the slots that each head goes on with.
        ahead: Tokens that are written with all slots.

    Raises:
        OptionError: The share is not above 0 and at most 1, or not given; or `ahead` is below 0.
    """

    share: float | None = None
    ahead: int = 8

    role: ClassVar[str] = ""
    what: ClassVar[str] = "slots that are dropped"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise OptionError("share", self.share, "it is the share of the slots that each head sees, such as 0.1")
        if not isinstance(self.ahead, int) or self.ahead < 0:
            raise OptionError("ahead", self.ahead, "it is a number of tokens, 0 or more")

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session that goes on with a part of the slots (raises what SparseSession raises)."""
        assert self.share is not None, "it is checked"
        return SparseSession(target, self.share, self.ahead)


def chosen_slots(mass: NDArray[np.float32], n_heads: int, n_kept: int) -> NDArray[np.int32]:
    """Return int32[n_layer, n_heads, n_kept], the best slots for each head, by f32[n_layer, queries' heads, n]."""
    worth = mass.reshape(len(mass), n_heads, -1, mass.shape[-1]).sum(axis=2)
    padded = np.pad(worth, ((0, 0), (0, 0), (POOL // 2, POOL // 2)))
    pooled = np.lib.stride_tricks.sliding_window_view(padded, POOL, axis=-1).max(axis=-1)
    pooled[..., :SINKS] = pooled[..., -WINDOW:] = np.inf
    return np.sort(np.argsort(-pooled, axis=-1, kind="stable")[..., :n_kept], axis=-1).astype(np.int32)


class SparseSession(UnsavedSession, OuterSession):
    """Implements edgedec.model.Session for texts whose rows see a part of the slots.

    Rows before the first place see all of the text. Those behind a place see what was chosen there, and all since then.

    Args:
        inner: Holds the text up to the first place.
        share: The share of the slots before a place that each head sees.
        ahead: The first place is so many tokens behind the prompt.
        every: The next place is so many tokens behind one.

    Raises:
        CapabilityError: The session inside can't gather slots.
    """

    what = "a session that reads slots in part"
    option = "method"

    def __init__(self, inner: Session, share: float, ahead: int, every: int = 1 << 24) -> None:
        super().__init__(inner)
        if not isinstance(inner, CpuSession) or not inner.gathered_heads:
            raise CapabilityError(
                "slots are read in part on the cpu runtime, one request at a time, by models whose layers all see all "
                f"of a text; leave {argument('method')} or {argument('n_parallel')} out"
            )
        self._exact = self._whole = inner  # _whole: a fork with what rows behind places wrote, once there is a second
        self._small, self._share, self._ahead, self._every = inner.model.session(inner.n_ctx), share, ahead, every
        self._first = self._place = self._n_kept = 0  # the text's first place, the latest one, and the slots chosen there
        self._ids: list[int] = []  # of the text
        self._branched: NDArray[np.int32] | None = None  # tokens of the last tree

    @property
    def n_cached(self) -> int:
        """How many tokens of the text were evaluated; those behind a place count while it is written."""
        return self._place + self._small.n_cached - self._n_kept if self._place else self.inner.n_cached

    @property
    def draft_head(self) -> None:
        """None: no head follows rows that see a part of the slots."""

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Begin to read a prompt; see edgedec.model.RecallingSession."""
        self._ids = list(token_ids)
        return self._exact.recall(token_ids, n_held)

    @contextmanager
    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> Iterator[None]:
        """Begin a text; behind the first place its rows see a part of the slots, where that leaves some out."""
        place = n_prompt + self._ahead
        self._first = place if self._n_seen(place) < place else 0
        try:
            with self.inner.generating(n_prompt, sampling, seed, stats):
                yield
        finally:
            if stats is not None and self._place:
                stats.add_note(f"lossy: each head saw {self._n_kept} of the first {self._place} tokens")
            self._go_to(0, 0)
            self._first = 0

    def _n_seen(self, place: int) -> int:
        return max(math.ceil(self._share * place), LEAST)

    def _places(self, position: int) -> tuple[int, int]:
        """Return the place that a row stands behind, 0 for none, and the next one."""
        if not self._first or position < self._first:
            return 0, self._first or self.n_ctx
        place = position - (position - self._first) % self._every
        return place, place + self._every

    def room(self, n_tokens: int) -> int:
        """Return how many rows after a text of `n_tokens` tokens see what the text's last token sees."""
        return min(super().room(n_tokens), self._places(n_tokens - 1)[1] - n_tokens)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item; see Session.evaluate (ContextFullError: a place is within a tree, too)."""
        tokens, n_past = tokens_of(item, self.what, self.option), item.n_past
        place, end = self._places(n_past)
        if (cut := end - n_past) < len(tokens) and n_past + len(tokens) <= self.n_ctx:
            if item.is_tree:
                raise ContextFullError("other slots are seen within this tree; ask for no more nodes than room() says")
            rows = item.logit_rows
            first = owned(self.evaluate(replace(with_tokens(item, tokens[:cut]), rows=rows[rows < cut]), on_progress))
            behind = replace(with_tokens(item, tokens[cut:]), n_past=end, rows=rows[rows >= cut] - np.int32(cut))
            last = owned(self.evaluate(behind, on_progress))
            hidden = {tap: np.concatenate([first.hidden[tap], last.hidden[tap]]) for tap in item.taps}
            return Forward(np.concatenate([first.logits, last.logits]), hidden, last.ops, is_own=True)
        if place != self._place:
            self._go_to(place, n_past)
        self._ids[n_past:], self._branched = tokens.tolist(), tokens if item.is_tree else None
        if not place:
            return super().evaluate(item, on_progress)
        of_small = replace(item, session=self._small, n_past=self._n_kept + n_past - place)
        return self._small.evaluate(of_small, on_progress)

    def _go_to(self, place: int, n_past: int) -> None:
        """Let the next rows, behind the first `n_past` tokens, see what is chosen at a place; 0 for all."""
        before, self._place = self._place, 0
        if place <= self._first and self._whole is not self._exact:
            self._whole.close()
            self._whole = self._exact
        n_layer, n_heads = self.model.card.n_layer, self._exact.gathered_heads
        if 0 < before < place:  # what was written since the place before lies behind what was chosen there
            self._whole = self._exact.fork() if self._whole is self._exact else self._whole
            written = np.arange(self._n_kept, self._n_kept + place - before, dtype=np.int32)
            self._whole.gather(self._small, np.broadcast_to(written, (n_layer, n_heads, len(written))), before)
        if not place:
            return
        ids = np.array(self._ids[place - (WINDOW if place == self._first else RECENT) : place], np.int32)
        mass = dict.fromkeys(range(n_layer), np.ones(len(ids), np.float32))
        item = ForwardItem(self._whole, place - len(ids), (RowGroup(ids),), _NO_ROWS, mass=mass)
        found, self._n_kept = self._whole.evaluate(item).mass, self._n_seen(place)
        assert found is not None, "it was asked for"
        self._small.gather(self._whole, chosen_slots(found, n_heads, self._n_kept), 0)
        if place < n_past:  # the text went back over a place
            self._small.forward(np.array(self._ids[place:n_past], np.int32), n_past=self._n_kept, rows=_NO_ROWS)
        self._place = place

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        n, tokens = self.n_cached, self._branched
        (self._small if self._place else self.inner).keep(rows)
        if tokens is not None:
            self._ids[n:], self._branched = tokens[rows].tolist(), None

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        for session in (self.inner, self._small, self._whole):
            session.cancel()

    def close(self) -> None:
        """Free the KV caches; calling it again does nothing."""
        for session in (self.inner, self._small, self._whole):
            session.close()
