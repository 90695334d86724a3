"""Several texts of one prompt as a stream of tokens: together where the runtime can do that, else one after another."""

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter

from edgedec.constraint import OpenConstraint
from edgedec.decoding.generate import begun, check_request, decoded, generation_of
from edgedec.decoding.session_pool import SessionPool, SessionSlot, session_for
from edgedec.decoding.stream import Stream, Visit
from edgedec.decoding.text_batch import TextBatch
from edgedec.decoding.text_room import require_room
from edgedec.errors import CancelledError, CapabilityError, RequestError
from edgedec.progress import CancelToken, OnProgress
from edgedec.sequence import Generation, Request, SampleOutput, TextState, TokenOutput, Until
from edgedec.sessions.text_pages import require_count
from edgedec.stats import DecodeStats


class SampleStream(Stream[SampleOutput]):
    """Yields the tokens of several texts of one prompt, as they are generated: of each step, those of text 0 first.

    Text k is what the seed of text 0 plus k gives alone. Closing or dropping the stream stops all texts. Between two
    tokens, the thread that reads may fork(), drop() and choose() texts.
    """

    def __init__(
        self,
        pool: SessionPool[SessionSlot],
        request: Request,
        n: int,
        open_constraint: OpenConstraint,
        *,
        until: Until | None = None,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        super().__init__(cancel)
        require_count(n, "n")
        if request.prompt_ids or cancel is None or not cancel.cancelled:  # else it was cancelled during rendering
            constraint = open_constraint()
            try:  # what the texts would raise before their first token is raised at once
                check_request(request, pool.slots[0].session, constraint)
                begun(request, pool.slots[0], constraint)
            finally:
                if constraint is not None:
                    constraint.close()
            require_room(pool.slots[0], n, len(request.prompt_ids), request.sampling.max_tokens)
        self._writing = _Writing(pool.slots[0], request, n, open_constraint, until, self.stop)
        self.read_from(_written(pool, self._writing, on_progress, weakref.ref(self)))

    @property
    def generations(self) -> tuple[Generation, ...]:
        """What was generated so far, by the number of the text; texts that have not ended are "cancelled".

        It can be read at any time. Texts that were forked off have the numbers behind the first n.
        """
        its = self._writing
        if its.batch is not None:
            return its.batch.generations
        unbegun = range(len(its.alone), its.n)
        texts = [*its.alone, *((begun(its.request.text(k), its.slot, None), []) for k in unbegun)]
        return tuple(generation_of(state, outputs) for state, outputs in texts)

    @property
    def live(self) -> tuple[int, ...]:
        """The numbers of the texts that are being written together; none before the first token is read."""
        return () if self._writing.batch is None else tuple(run.number for run in self._writing.batch.live)

    def has_ended(self, text: int) -> bool:
        """Tell whether a text is complete, and its last token was read."""
        its = self._writing
        if its.batch is not None:
            return text not in its.batch.unsettled and all(output.text != text for output in its.pending)
        return text < len(its.alone) and its.alone[text][0].finish_reason is not None

    def stats(self, text: int) -> DecodeStats:
        """Return the statistics of a text, which grow while it is written (RequestError: no token of it was read)."""
        batch, alone = self._writing.batch, self._writing.alone
        if not 0 <= text < (len(alone) if batch is None else len(batch.outputs)):
            raise RequestError(f"there is no text {text!r:.40} yet; read its first token before")
        return alone[text][0].stats if batch is None else batch.stats(text)

    def fork(self, text: int, n: int = 1) -> list[int]:
        """Let `n` more texts go on from where a text is now, and return their numbers.

        Texts grow by whole steps, so the latest tokens of a text may not have been read yet; the new texts have them,
        too. Each new text draws with the next seed.

        Raises:
            RequestError: The text isn't being written, or there would be too many; nothing was forked.
            MemoryCapError: The memory plan has no room for more texts beside the others, to the ends of all.
            CapabilityError: The texts are written one after another, as the runtime can't do better.
            SessionError: Another thread is reading, or a callback of the stream calls.
        """
        with self._changing() as batch:
            require_count(n, "n")
            if len(batch.live) + n > batch.forks.most:
                raise RequestError(f"{len(batch.live)} texts and {n} more are over {batch.forks.most}; drop some first")
            batch.require_room(text, n)
            forks = [batch.fork(text) for _ in range(n)]
            self._writing.forked_at |= {k: batch.n_drawn(k) for k in forks}
            return forks

    def drop(self, text: int) -> None:
        """Stop writing a text; what was written stays in `generations`. Raises what fork() raises."""
        with self._changing() as batch:
            batch.drop(text)
            self._writing.forget(lambda number: number == text)

    def choose(self, text: int) -> None:
        """Stop writing all texts but one. Raises what fork() raises."""
        with self._changing() as batch:
            batch.choose(text)
            self._writing.forget(lambda number: number != text)

    @contextmanager
    def _changing(self) -> Iterator[TextBatch]:
        """Keep other threads from reading inside the block, which changes the texts."""
        visit, batch = Visit(), self._writing.batch
        try:
            self.reader.enter(visit)
            if batch is None and self._writing.alone:
                raise CapabilityError(
                    "these texts are written one after another, so they can't be forked, dropped or chosen; their "
                    "statistics say why, and edgedec doctor lists the runtimes"
                )
            if batch is None:
                raise RequestError("no text is being written yet; read the first token before")
            yield batch
        finally:
            self.reader.leave(visit)


@dataclass(slots=True)
class _Writing:
    """The texts of a stream; the stream refers to it, not the other way round, so that a dropped stream ends.

    Attributes:
        batch: The texts, where they are written together; None before, and where they are written one after another.
        alone: The texts that are written one after another, with their tokens so far.
        pending: Tokens of the latest step that have not been read yet.
        ended: With `until`, the texts that have ended, in the order of their ends.
        n_settled: With `until`, how many tokens drawn for each text were taken into account.
        forked_at: With `until`, by text that was forked off, how many tokens it began with.
    """

    slot: SessionSlot
    request: Request
    n: int
    open_constraint: OpenConstraint
    until: Until | None
    stop: CancelToken
    batch: TextBatch | None = None
    alone: list[tuple[TextState, list[TokenOutput]]] = field(default_factory=list)
    pending: list[SampleOutput] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    n_settled: int = 0
    forked_at: dict[int, int] = field(default_factory=dict)

    def forget(self, dropped: Callable[[int], bool]) -> None:
        """Leave out the tokens of dropped texts that have not been read."""
        self.pending = [output for output in self.pending if not dropped(output.text)]

    def together(self, batch: TextBatch) -> Iterator[SampleOutput]:
        """Yield the tokens of all texts of a batch that has read the prompt."""
        self.batch, stop = batch, self.stop
        batch.holds_ended = self.until is not None
        while batch.live and not stop.cancelled:
            outputs = batch.step()
            self.pending += outputs if self.until is None else self._settled(batch, self.until)
            while self.pending and not stop.cancelled:
                yield self.pending.pop(0)
        yield from batch.end_all()

    def _settled(self, batch: TextBatch, until: Until) -> list[SampleOutput]:
        """Return the tokens that plain decoding would have drawn by now, and ask where it ends texts whether all end.

        Drafts let some texts run ahead. So a text counts as ended only when every other one has ended, too, or has as
        many tokens drawn; the order is that of plain decoding, which draws a token for each text in a step. Where the
        others end then, they end with the tokens that plain decoding would have drawn.
        """
        settled: list[SampleOutput] = []
        while self.n_settled < _n_certain(batch):
            self.n_settled += 1
            now, outputs = self.n_settled, batch.outputs
            writing = [k for k in batch.unsettled if self.forked_at.get(k, 0) < now <= len(outputs[k])]
            settled += [SampleOutput(k, outputs[k][now - 1]) for k in writing]
            live = {run.number for run in batch.live}
            new = [k for k in batch.unsettled if k not in live and batch.n_drawn(k) <= now]
            batch.settle(new)
            self.ended += new
            if new and batch.unsettled and until([batch.generations[k] for k in self.ended]):
                return settled + batch.end_at(now)
        return settled

    def one_by_one(self, slot: SessionSlot, on_progress: OnProgress | None, why: str) -> Iterator[SampleOutput]:
        """Yield the tokens of text after text."""
        done: list[Generation] = []
        for k in range(self.n):
            constraint = self.open_constraint()
            state = begun(self.request.text(k), slot, constraint)
            state.stats.add_note(f"the texts are written one after another: {why}")
            outputs: list[TokenOutput] = []
            self.alone.append((state, outputs))
            if self.stop.cancelled or (done and self.until is not None and self.until(done)):
                state.finish_reason = "cancelled"
                continue
            for output in decoded(slot, state, self.stop, on_progress, constraint, perf_counter()):
                outputs.append(output)
                yield SampleOutput(k, output)
            if state.finish_reason != "cancelled":
                done.append(generation_of(state, outputs))


def _n_certain(batch: TextBatch) -> int:
    """Return after how many tokens drawn for each text it is certain which texts of a batch have ended."""
    if batch.live:
        return min(run.text.n_drawn for run in batch.live)
    return max(map(batch.n_drawn, batch.unsettled), default=0)


def _written(
    pool: SessionPool[SessionSlot],
    writing: _Writing,
    on_progress: OnProgress | None,
    stream: "weakref.ref[SampleStream]",
) -> Generator[SampleOutput]:
    """Wait for a session and yield the tokens of a stream's texts."""
    request, stop, started = writing.request, writing.stop, perf_counter()
    with session_for(pool, request, stop, stream) as slot:
        if slot is None:
            return
        batch = TextBatch(slot, request, writing.open_constraint, started)
        try:
            with stop.calling(batch.forks.cancel):
                batch.read_prompt(writing.n, on_progress)
                yield from writing.together(batch)
                return
        except CancelledError:
            return
        except CapabilityError as error:
            if batch.live:
                raise
            why = str(error)
        finally:
            batch.close()
        yield from writing.one_by_one(slot, on_progress, why)
