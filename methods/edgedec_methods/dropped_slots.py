"""SpecKV: behind a long prompt, each head of each layer goes on with the slots that the latest rows attended to.

A few tokens are written with all slots (in the paper a draft model writes them). What the last rows attend to then says
what a slot is worth to a key-value head. A second session gets each head's best slots at their positions, and steps
read that; the first one keeps all for a chat's next turn.

Lossy: what was left out is not seen any more. The text depends on model, options, prompt, settings and seed alone.

Paper: SpecKV, Galim et al. 2025, arXiv:2506.08373; without a draft model SnapKV, Li et al. 2024, arXiv:2404.14469
Option: `--method dropped-slots:0.1`
For: texts of over a hundred tokens behind prompts of 8,000 and more
Measured: 16,000 tokens: a step of the 1.5B in 0.59 of the time; 8,000: 11 of 40 questions right for 18, 0.25 nats off
Status: opt-in
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, cast

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

WINDOW, RECENT, SINKS = 32, 8, 4
"""Rows whose attention counts at the first place, and at further ones; so many last slots, and first slots, stay."""
POOL, LEAST = 7, 256
"""Slots that have the worth of the best one among them; the fewest slots that are seen."""


@dataclass(frozen=True, slots=True)
class DroppedSlots:
    """Implements edgedec.companion.Companion, with the options of a method.

    Attributes:
        share: The share of the slots that each head goes on with.
        ahead: Tokens that are written with all slots.

    Raises:
        OptionError: The share is not given, or not above 0 and at most 1.
    """

    share: float | None = None
    ahead: int = 8

    role: ClassVar[str] = ""
    what: ClassVar[str] = "slots that are dropped"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise OptionError("share", self.share, "it is the share of the slots that each head sees, such as 0.1")

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session that goes on with a part of the slots (raises what SparseSession raises)."""
        return SparseSession(target, self.share or 1.0, self.ahead)


def chosen_slots(mass: NDArray[np.float32], n_heads: int, n_kept: int) -> NDArray[np.int32]:
    """Return int32[n_layer, n_heads, n_kept], the best slots for each head, by f32[n_layer, queries' heads, n]."""
    worth = mass.reshape(len(mass), n_heads, -1, mass.shape[-1]).sum(axis=2)
    padded = np.pad(worth, ((0, 0), (0, 0), (POOL // 2, POOL // 2)))
    pooled = np.lib.stride_tricks.sliding_window_view(padded, POOL, axis=-1).max(axis=-1)
    pooled[..., :SINKS] = pooled[..., -WINDOW:] = np.inf
    return np.sort(np.argsort(-pooled, axis=-1, kind="stable")[..., :n_kept], axis=-1).astype(np.int32)


class SparseSession(UnsavedSession, OuterSession):
    """Implements edgedec.model.Session for texts whose rows see a part of the slots.

    Rows up to the first place, `ahead` tokens behind the prompt, see all of the text. Those behind a place see what was
    chosen there, a share of the slots, and all since then; the next place is `every` tokens behind it. CapabilityError:
    the session inside can't gather slots.
    """

    what = "a session that reads slots in part"
    option = "methods"

    def __init__(self, inner: Session, share: float, ahead: int, every: int = 1 << 24) -> None:
        super().__init__(inner)
        if not isinstance(inner, CpuSession) or not inner.gathered_heads:
            what = "slots are read in part on the cpu runtime, a request at a time, by layers that see all of a text"
            raise CapabilityError(f"{what}; leave the method or {argument('n_parallel')} out")
        self._exact = self._whole = inner  # the latter also has what is written behind places: a fork
        self._small = cast(CpuSession, inner.model.session(inner.n_ctx))
        self._share, self._ahead, self._every = share, ahead, every
        self._first = self._place = self._n_kept = 0  # the first place, the latest one, and the slots chosen there
        self._ids, self._branched = list[int](), np.empty(0, np.int32)  # tokens of the text, and of the last rows

    @property
    def n_ctx(self) -> int:
        """Tokens of the longest text for which both sessions together keep to the memory that was planned for one."""
        return min(self.inner.n_ctx, max(LEAST, int((self.inner.n_ctx - LEAST) / (1 + self._share))))

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
        self._first = place if max(self._share * place, LEAST) < place - 1 else 0
        try:
            with self.inner.generating(n_prompt, sampling, seed, stats):
                yield
        finally:
            if stats is not None and self._place:
                stats.add_note(f"lossy: each head saw {self._n_kept} of the first {self._place} tokens")
            self._go_to(0, 0)
            self._first = 0

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
        """Evaluate an item; see Session.evaluate (ContextFullError: also where a place is within a tree)."""
        tokens, n_past = tokens_of(item, self.what, self.option), item.n_past
        (place, end), n_all = self._places(n_past), n_past + len(tokens)
        if n_all > self.n_ctx or (item.is_tree and n_all > end):
            raise ContextFullError(f"{n_all} tokens do not fit; ask for no more rows than room({n_past}) says")
        if end < n_all:
            rows, cut = item.logit_rows, end - n_past
            first = owned(self.evaluate(replace(with_tokens(item, tokens[:cut]), rows=rows[rows < cut]), on_progress))
            behind = replace(with_tokens(item, tokens[cut:]), n_past=end, rows=rows[rows >= cut] - np.int32(cut))
            last = owned(self.evaluate(behind, on_progress))
            hidden = {tap: np.concatenate([first.hidden[tap], last.hidden[tap]]) for tap in item.taps}
            return Forward(np.concatenate([first.logits, last.logits]), hidden, last.ops, is_own=True)
        if place != self._place:
            self._go_to(place, n_past)
        self._ids[n_past:], self._branched = tokens.tolist(), tokens
        inner, n_past = (self._small, self._n_kept + n_past - place) if place else (self._exact, n_past)
        return inner.evaluate(replace(item, session=inner, n_past=n_past), on_progress)

    def _go_to(self, place: int, n_past: int) -> None:
        """Let the next rows, behind the first `n_past` tokens, see what is chosen at a place; 0 for all."""
        before, self._place = self._place, 0
        if place <= self._first and self._whole is not self._exact:
            self._whole.close()
            self._whole = self._exact
        if not place:
            return
        n_layer, n_heads = self.model.card.n_layer, self._exact.gathered_heads
        if 0 < before < place:  # what was written since the place before lies behind what was chosen there
            self._whole = cast(CpuSession, self._exact.fork()) if self._whole is self._exact else self._whole
            written = np.arange(self._n_kept, self._n_kept + place - before, dtype=np.int32)
            self._whole.gather(self._small, np.broadcast_to(written, (n_layer, n_heads, len(written))), before)
        ids = np.array(self._ids[place - (WINDOW if place == self._first else RECENT) : place], np.int32)
        mass, none = dict.fromkeys(range(n_layer), np.ones(len(ids), np.float32)), np.empty(0, np.int32)
        item = ForwardItem(self._whole, place - len(ids), (RowGroup(ids),), none, mass=mass)
        seen, self._n_kept = self._whole.evaluate(item).mass, max(math.ceil(self._share * place), LEAST)
        assert seen is not None, "it was asked for"
        self._small.scales = self._exact.scales
        self._small.gather(self._whole, chosen_slots(seen, n_heads, self._n_kept), 0)
        if place < n_past:  # the text went back over a place
            self._small.forward(np.array(self._ids[place:n_past], np.int32), n_past=self._n_kept, rows=none)
        self._place = place

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        self._ids[self.n_cached :] = self._branched[rows].tolist()
        (self._small if self._place else self.inner).keep(rows)

    def cancel(self) -> None:
        for session in (self.inner, self._small, self._whole):
            session.cancel()

    def close(self) -> None:
        for session in (self.inner, self._small, self._whole):
            session.close()
