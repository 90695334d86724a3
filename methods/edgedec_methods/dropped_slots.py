"""SpecKV: behind a long prompt, each head of each layer goes on with the slots that the latest rows attended to.

The whole prompt is read, and AHEAD tokens are written with all of it. The attention of the last WINDOW rows then says
what a slot is worth to a key-value head: the sum over its queries, and what the best slot of POOL around it has, so
words stay whole. Each head keeps its own best slots, and the first and last ones. A second session holds these, at
their positions, and a step reads that one. (In the paper a draft model writes ahead what the rows will ask about.)

Lossy: what was left out is not seen any more. The text depends on the model, the share, the prompt, the settings and
the seed, and on nothing else. The first session keeps all slots for a chat's next turn; the second one is beside it.

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

from edgedec.errors import CapabilityError, ContextFullError, OptionError, SessionError, argument, counted
from edgedec.model import Forward, ForwardItem, RowGroup, Session
from edgedec.progress import OnProgress
from edgedec.sampling import SamplingParams
from edgedec.sessions.joined_work import owned
from edgedec.sessions.outer_session import OuterSession, UnsavedSession
from edgedec.stats import DecodeStats
from edgedec_methods.sliding_window import tokens_of, with_tokens
from edgedec_runtimes.cpu.session import CpuSession

AHEAD = 8
"""Tokens that are written with all of the prompt."""
WINDOW = 32
"""Rows whose attention says what a slot is worth; their own slots stay."""
POOL, SINKS, LEAST = 7, 4, 256
"""Slots that have the worth of the best one among them; first slots, which stay; the fewest slots that are seen."""
_NO_ROWS = np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class DroppedSlots:
    """Implements edgedec.companion.Companion: the options of slots that are dropped behind the prompt.

    Attributes:
        share: The share of the slots that each head goes on with.

    Raises:
        OptionError: The share is not above 0 and at most 1, or not given.
    """

    share: float | None = None

    role: ClassVar[str] = ""
    what: ClassVar[str] = "slots that are dropped"
    model: ClassVar[None] = None

    def __post_init__(self) -> None:
        if not isinstance(self.share, int | float) or not 0 < self.share <= 1:
            raise OptionError("share", self.share, "it is the share of the slots that each head sees, such as 0.1")

    def session(self, target: Session, companion: Session | None) -> Session:
        """Return a session that goes on with a part of the slots (raises what SparseSession raises)."""
        return self.session_of(target, every=0)

    def session_of(self, target: Session, every: int) -> "SparseSession":
        """Return a session whose slots are chosen each so many tokens, 0 for once (raises what SparseSession raises)."""
        assert self.share is not None, "it is checked"
        return SparseSession(target, self.share, every)


def chosen_slots(mass: NDArray[np.float32], n_heads: int, n_kept: int) -> NDArray[np.int32]:
    """Return int32[n_layer, n_heads, n_kept], the slots of the highest worth to each key-value head, ascending.

    `mass`, f32[n_layer, queries' heads, n], is what these attended to each slot.

    >>> mass = np.zeros((1, 4, 300), np.float32); mass[0, 0, 50] = 1; mass[0, 3, 90] = 1
    >>> chosen_slots(mass, 2, 43)[0, :, 4:12].tolist()
    [[47, 48, 49, 50, 51, 52, 53, 268], [87, 88, 89, 90, 91, 92, 93, 268]]
    """
    worth = mass.reshape(len(mass), n_heads, -1, mass.shape[-1]).sum(axis=2)
    padded = np.pad(worth, ((0, 0), (0, 0), (POOL // 2, POOL // 2)))
    pooled = np.lib.stride_tricks.sliding_window_view(padded, POOL, axis=-1).max(axis=-1)
    pooled[..., :SINKS] = pooled[..., -WINDOW:] = np.inf
    best = np.argsort(-pooled, axis=-1, kind="stable")[..., :n_kept]
    return np.sort(best, axis=-1).astype(np.int32)


class SparseSession(UnsavedSession, OuterSession):
    """Implements edgedec.model.Session for texts whose rows see a part of the slots.

    Rows before the first place see all of the text. Those behind a place see what was chosen there, and all since then.

    Args:
        inner: Holds the text up to the first place.
        share: The share of the slots before a place that each head sees.
        every: The next place is so many tokens behind one; 0 for a single place.

    Raises:
        CapabilityError: The session inside can't gather slots, or return the mass of attention.
    """

    what = "a session that reads slots in part"
    option = "method"

    def __init__(self, inner: Session, share: float, every: int = 0) -> None:
        super().__init__(inner)
        if not isinstance(inner, CpuSession) or not inner.gathered_heads:
            raise CapabilityError(
                "slots are read in part on the cpu runtime, one request at a time, by models whose layers all see all "
                f"of a text; leave {argument('method')} or {argument('n_parallel')} out"
            )
        self._exact = self._whole = inner  # _whole: a fork with what rows behind places wrote, once there is a second
        self._small, self._share, self._every = inner.model.session(inner.n_ctx), share, every
        self._first = self._place = 0  # the first place of the text that is written, and the latest one; 0 for none
        self._n_kept = 0  # slots that were chosen at the latest place
        self._ids: list[int] = []  # of the text
        self._branched: NDArray[np.int32] | None = None  # tokens of the last tree

    @property
    def n_cached(self) -> int:
        """How many tokens of the text were evaluated; those behind a place count while it is written."""
        return self._place + self._small.n_cached - self._n_kept if self._place else self.inner.n_cached

    @property
    def draft_head(self) -> None:
        """None: no head follows rows that see a part of the slots."""
        return None

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Begin to read a prompt; see edgedec.model.RecallingSession."""
        self._ids = list(token_ids)
        return self._exact.recall(token_ids, n_held)

    @contextmanager
    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> Iterator[None]:
        """Begin a text; behind the first place its rows see a part of the slots, where that leaves some out."""
        place = n_prompt + AHEAD
        self._first = place if self._n_seen(place) < place else 0
        try:
            with self.inner.generating(n_prompt, sampling, seed, stats):
                yield
        finally:
            if stats is not None and self._place:
                seen, behind = counted(self._n_kept, "slot"), counted(self._place, "token")
                stats.add_note(f"lossy: behind {behind} each head saw {seen} of these")
            self._go_to(0, 0)
            self._first = 0

    def _n_seen(self, place: int) -> int:
        return max(math.ceil(self._share * place), LEAST)

    def _places(self, position: int) -> tuple[int, int]:
        """Return the place that a row stands behind, 0 for none, and the next one."""
        if not self._first or position < self._first:
            return 0, self._first or self.n_ctx
        if not self._every:
            return self._first, self.n_ctx
        place = position - (position - self._first) % self._every
        return place, place + self._every

    def room(self, n_tokens: int) -> int:
        """Return how many rows after a text of `n_tokens` tokens see what the text's last token sees."""
        return min(super().room(n_tokens), self._places(n_tokens - 1)[1] - n_tokens)

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item, whose n_past counts the text's tokens; see Session.forward.

        Raises:
            CapabilityError: Hidden states, or positions apart from slots, were given.
            ContextFullError: A place is within a tree.
        """
        tokens, n_past = tokens_of(item, self.what, self.option), item.n_past
        if n_past > self.n_cached:
            raise SessionError(f"n_past is {n_past}; the session has {counted(self.n_cached, 'token')}")
        place, end = self._places(n_past)
        if (n_first := end - n_past) < len(tokens) and n_past + len(tokens) <= self.n_ctx:
            if item.is_tree:
                raise ContextFullError("other slots are seen within this tree; ask for no more nodes than room() says")
            rows = item.logit_rows
            first = replace(with_tokens(item, tokens[:n_first]), rows=rows[rows < n_first])
            later = replace(with_tokens(item, tokens[n_first:]), n_past=end, rows=rows[rows >= n_first] - n_first)
            before, behind = (owned(self.evaluate(each, on_progress)) for each in (first, later))
            hidden = {tap: np.concatenate([before.hidden[tap], behind.hidden[tap]]) for tap in item.taps}
            return Forward(np.concatenate([before.logits, behind.logits]), hidden, behind.ops, is_own=True)
        self._go_to(place, n_past)
        self._ids[n_past:] = tokens.tolist()
        self._branched = tokens if item.is_tree else None
        if not place:
            return super().evaluate(item, on_progress)
        return self._small.evaluate(
            replace(item, session=self._small, n_past=self._n_kept + n_past - place), on_progress
        )

    def _go_to(self, place: int, n_past: int) -> None:
        """Let the next rows, behind the first `n_past` tokens, see what is chosen at a place; 0 for all."""
        if place == self._place:
            return
        before, self._place = self._place, 0
        if place <= self._first and self._whole is not self._exact:
            self._whole.close()
            self._whole = self._exact
        if 0 < before < place:  # what was written since the place before lies behind what was chosen there
            if self._whole is self._exact:
                self._whole = self._exact.fork()
            shape = self.model.card.n_layer, self._exact.gathered_heads, place - before
            written = np.arange(self._n_kept, self._n_kept + place - before, dtype=np.int32)
            self._whole.gather(self._small, np.broadcast_to(written, shape), before)
        if not place:
            return
        begin, layers = max(place - WINDOW, 0), range(self.model.card.n_layer)
        group = RowGroup(np.array(self._ids[begin:place], np.int32))
        mass = dict.fromkeys(layers, np.ones(place - begin, np.float32))
        forward = self._whole.evaluate(ForwardItem(self._whole, begin, (group,), _NO_ROWS, mass=mass))
        assert forward.mass is not None, "it was asked for"
        slots = chosen_slots(forward.mass, self._exact.gathered_heads, self._n_seen(place))
        self._small.gather(self._whole, slots, 0)
        self._n_kept = slots.shape[-1]
        if place < n_past:  # the text went back over a place
            ids = np.array(self._ids[place:n_past], np.int32)
            self._small.forward(ids, n_past=self._n_kept, rows=_NO_ROWS)
        self._place = place

    def keep(self, rows: NDArray[np.int32]) -> None:
        """Keep the path `rows` of the last tree and drop its other rows."""
        n, tokens = self.n_cached, self._branched
        (self._small if self._place else self.inner).keep(rows)
        if tokens is not None:
            self._ids[n:] = tokens[rows].tolist()
        self._branched = None

    def cancel(self) -> None:
        """Stop the forward that is running, from any thread; without one, nothing happens."""
        for session in (self.inner, self._small, self._whole):
            session.cancel()

    def close(self) -> None:
        """Free the KV caches; calling it again does nothing."""
        for session in (self.inner, self._small, self._whole):
            session.close()
