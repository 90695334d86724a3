"""Forwards of several threads joined into one, so that parallel requests share each reading of the weights.

Calls of heads and of draft models are joined before the forwards that verify, and each request has its draft length, as
in FASER (Chen et al. 2026, arXiv:2604.20503); that one also prunes within a verification, and drafts beside it.

A thread waits a moment for the sessions whose next forward is due; the one that comes last evaluates the rows of all:
continuous batching (Orca, Yu et al. 2022, OSDI; Flover, arXiv:2305.13484). So no thread is woken before a forward, and
each one once behind it: to wake a thread takes longer than a step's Python. Long prompts are read in pieces, and other
sessions' steps go on between them. Where a model's rows depend on others in a forward, each goes alone.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from time import monotonic, perf_counter
from typing import Any

from edgedec.cost_curve import SharedForward
from edgedec.errors import CancelledError, SessionError
from edgedec.head_state import DraftCall
from edgedec.model import Forward, ForwardItem, Model, RecallingSession, Session
from edgedec.progress import OnProgress, report_progress
from edgedec.sampling import SamplingParams
from edgedec.sessions.joined_work import Result, Work, cut, evaluated, groups
from edgedec.sessions.outer_session import OuterModel, OuterSession
from edgedec.stats import DecodeStats

PIECE_ROWS = 32
"""Rows of a prompt that one joined forward reads."""
LONE_PIECE_ROWS = 256
"""Rows of a prompt that a forward reads while no other session is due; a session that comes then waits for those."""

_SHARE = 0.1  # the next one is waited for at most this part of a forward's time
_LONGEST_S = 0.02


@dataclass(eq=False, slots=True)
class _Ticket:
    """A forward that a session waits for, or a call of one of its drafters.

    Attributes:
        session: The session that waits.
        item: What to evaluate, whose session is the runtime's; or the call.
        since: When the session began to wait, in seconds of the monotonic clock.
        running: Whether the item is being evaluated.
        cancelled: Whether the result is not wanted any more.
        result: The result of the forward, the call that was answered, or the error; None before there is one.
        shared: What the item was joined into, or None.
    """

    session: "BatchedSession"
    item: Work
    since: float
    running: bool = False
    cancelled: bool = False
    result: Result | None = None
    shared: SharedForward | None = None


class Batcher(OuterModel):
    """Implements edgedec.model.Model: joins the forwards of its sessions; one thread at a time uses each session.

    Attributes:
        joins: Whether forwards are joined and prompts cut; False where rows depend on what else is in a forward.
        lock: Held by whatever reads or changes who waits for what.
    """

    def __init__(self, inner: Model) -> None:
        super().__init__(inner, inner.card, inner.capabilities)
        self.joins = inner.batch_invariant is True
        self._pid = os.getpid()
        self.lock = threading.RLock()
        self._waiting: list[_Ticket] = []
        self._due: set[BatchedSession] = set()  # sessions in a generation that are not late
        self._drafted = 0.0  # when heads were last called
        self._busy = False
        self.last_s = 0.0  # seconds of the latest forward

    def session(self, n_ctx: int) -> "BatchedSession":
        """Open a session whose forwards are joined with the others' (raises what Model.session raises)."""
        return BatchedSession(self.inner.session(n_ctx), self)

    @contextmanager
    def taking_part(self, session: "BatchedSession") -> Iterator[None]:
        """Let others wait for this session's forwards inside the block."""
        with self.lock:
            self._due.add(session)
        try:
            yield
        finally:
            with self.lock:
                self._due.discard(session)
                self._wake_first()

    @property
    def n_due(self) -> int:
        """How many sessions are waited for now."""
        return len(self._due)

    def piece_rows(self, session: "BatchedSession") -> int:
        """Return how many rows of a session's prompt one forward reads."""
        return PIECE_ROWS if self._due - {session} else LONE_PIECE_ROWS

    def forward(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate items of sessions of this model in one forward, with the items of others that come then."""
        sessions: list[Any] = [item.session for item in items]
        for session in sessions:
            session.cancelled = False
        return self.joined(items)

    def joined(self, items: Sequence[ForwardItem]) -> list[Forward]:
        """Evaluate an item of each of some sessions, together with the items of others that come at the same time.

        Where the forward is given up, what lies beyond the items' n_past counts as dropped: else the caller would take
        what is still there of an older text for the tokens of an item.

        Returns:
            The items' results, in arrays of their own.

        Raises:
            What Session.evaluate raises. An item that is refused does not affect the other sessions.
        """
        tickets: list[_Ticket] = []
        for item in items:
            session = item.session
            assert isinstance(session, BatchedSession), "a model's forward takes sessions that the model opened"
            tickets.append(_Ticket(session, replace(item, session=session.inner), monotonic()))
        try:
            self._wait_for_all(tickets)
            forwards = []
            for ticket in tickets:
                forward = _result_of(ticket)
                assert isinstance(forward, Forward), "the result of an item is a forward"
                forward.shared = ticket.shared
                forwards.append(forward)
            if any(ticket.cancelled and not item.is_tree for ticket, item in zip(tickets, items, strict=True)):
                raise CancelledError("a forward was cancelled")  # of a tree, rows are still to be chosen, or dropped
        except BaseException as error:
            if isinstance(error, CancelledError) or not isinstance(error, Exception):
                for ticket, item in zip(tickets, items, strict=True):
                    ticket.session.n_valid = item.n_past
            raise
        for ticket in tickets:
            ticket.session.n_valid = None
        return forwards

    def answer(self, calls: Sequence[tuple["BatchedSession", DraftCall]]) -> list[SharedForward]:
        """Answer calls of drafters for some sessions together with those for others that come at the same time.

        Sessions whose forwards wait are not waited for; their forwards wait until the drafts are made.

        Returns:
            For each call, what it was answered together with.

        Raises:
            What DraftCall.answer raises. A call that fails does not affect the other sessions.
        """
        tickets = [_Ticket(session, call, monotonic()) for session, call in calls]
        self._wait_for_all(tickets)
        for ticket in tickets:
            _result_of(ticket)
        return [ticket.shared for ticket in tickets if ticket.shared is not None]  # as each that has a result

    def _wait_for_all(self, tickets: Sequence[_Ticket]) -> None:
        """Wait for the results of tickets of this thread, errors included."""
        with self.lock:
            for ticket in tickets:
                ticket.session.ticket = ticket
                self._waiting.append(ticket)
            try:
                for ticket in tickets:
                    self._wait_for(ticket)
            finally:
                for ticket in tickets:
                    self._take_out(ticket)

    def _wait_for(self, ticket: _Ticket) -> None:
        """Wait until a ticket has its result; evaluate a batch in this thread when there is one.

        The first of those that wait looks at the clock; the others are woken when they have a result, or are the first.
        """
        while ticket.result is None:
            if ticket.cancelled and not ticket.running:
                raise CancelledError("a forward was cancelled before it began")
            batch = [] if self._busy else self._complete_batch()
            if batch:
                self._lead(batch)
            elif self._busy or ticket is not self._waiting[0]:
                ticket.session.changed.wait()
            else:
                ticket.session.changed.wait(max(0.0, self._deadline() - monotonic()))

    def _take_out(self, ticket: _Ticket) -> None:
        """Drop a ticket, whatever ended the waiting (KeyboardInterrupt too); a forward that runs with it ends first."""
        if ticket in self._waiting:
            ticket.cancelled = True
            while ticket.running:
                ticket.session.changed.wait()
        ticket.session.ticket = None
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._wake_first()

    def _wake_first(self) -> None:
        """Let the first ticket that waits look again whether there is a batch."""
        if self._waiting:
            self._waiting[0].session.changed.notify()

    def cancel(self, session: "BatchedSession") -> None:
        """Cancel the forward that a session waits for; a forward shared with other sessions goes on for those."""
        if os.getpid() != self._pid:  # a forked process has a copy of the lock, maybe held by a thread that it lacks
            return
        with self.lock:
            session.cancelled = True
            ticket = session.ticket
            if ticket is None or not isinstance(ticket.item, ForwardItem):  # a draft takes a moment only
                return
            ticket.cancelled = True
            if ticket.running and not any(t.running and not t.cancelled for t in self._waiting):
                session.inner.cancel()
            session.changed.notify()

    def _deadline(self) -> float:
        """Return when the tickets have waited long enough, in seconds of the monotonic clock.

        Each session that comes lets the others wait anew, and so do drafts, whose sessions come back with forwards.
        """
        return max(self._waiting[-1].since, self._drafted) + min(_LONGEST_S, _SHARE * self.last_s)

    def _complete_batch(self) -> list[_Ticket]:
        """Return the tickets to evaluate now; none while other sessions are due and there is time to wait for them.

        Drafters' calls come before forwards: the sessions that draft have rows in the forward that the others wait for.
        """
        tickets = [ticket for ticket in self._waiting if not ticket.cancelled]
        if not self.joins:
            return tickets[:1]
        missing = self._due - {ticket.session for ticket in tickets}
        if missing and monotonic() < self._deadline():
            return []
        self._due -= missing  # they are late, and not waited for until they come again
        self._due |= {ticket.session for ticket in tickets if ticket.session.taking_part}
        kinds = [None if isinstance(ticket.item, ForwardItem) else ticket.item.kind for ticket in tickets]
        for first in kinds:
            if first is not None:
                return [ticket for ticket, kind in zip(tickets, kinds, strict=True) if kind == first]
        items = [ticket.item for ticket in tickets if isinstance(ticket.item, ForwardItem)]
        fitting = groups(items, self.capabilities.max_rows)
        return tickets[: len(fitting[0])] if fitting else []

    def _lead(self, batch: list[_Ticket]) -> None:
        """Evaluate a batch in this thread, with the lock released meanwhile, and put the results into the tickets.

        After a KeyboardInterrupt in this thread the forwards of the others begin again.
        """
        self._busy = True
        for ticket in batch:
            ticket.running = True
        started = perf_counter()
        self.lock.release()
        try:
            results = evaluated(self.inner, [ticket.item for ticket in batch])
        finally:
            seconds = perf_counter() - started
            self.lock.acquire()
            self._busy = False
            for ticket in batch:
                ticket.running = False
                ticket.session.changed.notify()
        if isinstance(batch[0].item, ForwardItem):
            self.last_s = seconds
        else:
            self._drafted = monotonic()
        n_rows = 0
        for ticket, result in zip(batch, results, strict=True):
            shared = result.shared if isinstance(result, Forward) else None
            n_rows += ticket.item.n_rows if shared is None else shared.n_rows
        shared = SharedForward(seconds, n_rows, len(batch))
        for ticket, result in zip(batch, results, strict=True):
            self._waiting.remove(ticket)
            ticket.shared, ticket.result = shared, result
        self._wake_first()


def _result_of(ticket: _Ticket) -> Forward | DraftCall:
    """Return the result of a ticket that was waited for, or raise its error."""
    if isinstance(ticket.result, BaseException):
        raise ticket.result
    assert ticket.result is not None, "who waits for a ticket goes on when there is a result"
    return ticket.result


class BatchedSession(OuterSession):
    """Implements edgedec.model.Session over the runtime's.

    Attributes:
        model: Joins the session's forwards with others'.
        changed: Wakes the thread that waits for a result.
        taking_part: Whether a generation is running on the session.
        ticket: The forward that the session waits for, or None.
        cancelled: Whether cancel() was called since the latest forward began: a prompt's next piece is not read then.
        n_valid: How many of the tokens inside count, after a forward that was given up, or of a prefix; None for all.
    """

    model: Batcher

    def __init__(self, inner: Session, model: Batcher) -> None:
        super().__init__(inner, model)
        self.changed = threading.Condition(model.lock)
        self.taking_part = False
        self.ticket: _Ticket | None = None
        self.cancelled = False
        self.n_valid: int | None = None

    @property
    def n_cached(self) -> int:
        """Tokens in the KV cache, counted along the prefix."""
        return self.inner.n_cached if self.n_valid is None else min(self.inner.n_cached, self.n_valid)

    def answer(self, calls: Sequence[tuple[Session, DraftCall]]) -> list[SharedForward]:
        """Answer calls of drafters, together with those for other sessions where they come at the same time."""
        return self.model.answer([(session, call) for session, call in calls if isinstance(session, BatchedSession)])

    @contextmanager
    def generating(
        self, n_prompt: int, sampling: SamplingParams | None = None, seed: int = 0, stats: DecodeStats | None = None
    ) -> Iterator[None]:
        """Let other sessions wait for this session's forwards inside the block."""
        self.taking_part = True
        try:
            with self.model.taking_part(self):
                yield
        finally:
            self.taking_part = False
            with self.inner.generating(n_prompt, sampling, seed, stats):  # only now, as take_prefix() replaces it
                pass

    def evaluate(self, item: ForwardItem, on_progress: OnProgress | None = None) -> Forward:
        """Evaluate an item, together with other sessions' items where they come at the same time."""
        self.cancelled, n_end = False, item.n_past + item.n_rows
        if self._is_cut(item):
            while item.n_rows > (n_rows := self.model.piece_rows(self)):
                piece, item = cut(item, n_rows)
                self.model.joined([piece])
                report_progress(on_progress, "prefill", item.n_past, n_end, "tokens")
                if self.cancelled:  # between two pieces: no forward was there to cancel
                    raise CancelledError("a forward was cancelled")
        return self.model.joined([item])[0]

    def _is_cut(self, item: ForwardItem) -> bool:
        """Tell whether an item may be read in pieces: a prompt that fits, of which at most the last row is wanted."""
        group, at_most_last = item.group, item.rows == "last" if isinstance(item.rows, str) else not len(item.rows)
        plain = len(item.groups) == 1 and group.parents is None and not (item.taps or item.mass or group.span.enter)
        whole = group.block is not None and group.block.mutual
        return plain and at_most_last and not whole and self.model.joins and item.n_past + item.n_rows <= self.n_ctx

    def fork(self) -> "BatchedSession":
        """Open a second session that shares this one's cached prefix."""
        twin = BatchedSession(self.inner.fork(), self.model)
        twin.n_valid = self.n_valid
        return twin

    def take_prefix(self, other: Session, n_tokens: int) -> bool:
        """Hold the first `n_tokens` cached tokens of another session in place of what this one holds, by a fork of it.

        Any thread may be using the other session, which stays as it is. Returns whether it was done: only sessions of
        the same model with the same adapters can. Raises what other.fork() raises; nothing has changed then.
        """
        if not isinstance(other, BatchedSession) or other.inner.model is not self.inner.model:
            return False
        fork, before = other.inner.fork(), self.inner
        if fork.scales != before.scales:
            fork.close()
            return False
        with self.model.lock:  # as cancel() looks at the session inside
            self.inner, self.n_valid = fork, n_tokens
        before.close()
        return True

    def recall(self, token_ids: Sequence[int], n_held: int) -> int:
        """Let the session inside take back what is kept of a prompt, where it can."""
        inner = self.inner
        self.n_valid = n = inner.recall(token_ids, n_held) if isinstance(inner, RecallingSession) else n_held
        return n

    def save(self) -> bytes:
        """Serialize the cached KV."""
        if self.n_valid is not None and self.inner.n_cached > self.n_valid > 0:
            raise SessionError("a session can't be saved after a cancelled forward, or with a prefix; evaluate a token")
        return self.inner.save()

    def load(self, data: bytes, n_tokens: int) -> None:
        """Restore what save() returned."""
        self.inner.load(data, n_tokens)
        self.n_valid = None

    def cancel(self) -> None:
        """Stop the forward that is running or waited for, from any thread; without one, nothing happens."""
        self.model.cancel(self)
