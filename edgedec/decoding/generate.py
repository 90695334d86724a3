"""One generation from its request to its last token: the stream, and the loop of its steps.

Each text is drafted, verified and learned from by itself (step.py); of texts that are written together, only the
forward is common. So a text has the bits that it would have alone.
"""

import logging
import math
import weakref
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from pathlib import Path
from time import monotonic, perf_counter, sleep

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.decoding.ending import TextEnd, TextStream
from edgedec.decoding.prompt_length import too_long
from edgedec.decoding.reading import read_pictures, remember_cached, require_pictures, reread, reuse_prefix
from edgedec.decoding.session_pool import SessionPool, SessionSlot, session_for
from edgedec.decoding.step import Decoder, Prepared, alone, evaluated, prepare, take
from edgedec.decoding.stream import Stream
from edgedec.errors import (
    CancelledError,
    ContextFullError,
    EdgedecError,
    MemoryCapError,
    RequestError,
    RuntimeLostError,
    argument,
)
from edgedec.memory.shedding import Watch
from edgedec.model import Session
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.sampling import Noise
from edgedec.scheduler.drafter_set import Drafting, open_policy
from edgedec.sequence import COUPLED, Generation, Request, TextState, TokenOutput
from edgedec.stats import DecodeStats

logger = logging.getLogger("edgedec.decoding.generate")
_PAUSE_S = 1.0
_POLL_S = 0.05
_PHASE = "waiting for the model's machines"


@dataclass(eq=False, slots=True)
class TextRun:
    """A text while it is written.

    Attributes:
        decoder: What the text is decoded with.
        drafting: What opened its drafters, or None.
        number: The number of the text among those of its prompt.
        is_finished: Whether no text is held back any more.
        constraint_logprobs: By how many tokens were drawn, what `stats.constraint_logprob` was then.
    """

    text: TextState
    decoder: Decoder
    drafting: Drafting | None = None
    number: int = 0
    is_finished: bool = False
    constraint_logprobs: dict[int, float | None] = field(default_factory=dict)

    def outputs(self, start: int) -> Iterator[TokenOutput]:
        """Yield the tokens that a step added after the first `start` tokens; the text holds those that were yielded."""
        text, decoder, added = self.text, self.decoder, self.decoder.added
        tokens, n_prompt = added.verification.token_ids, len(text.request.prompt_ids)
        del text.token_ids[start:]
        for index, (token_id, new_text) in enumerate(zip(tokens, added.texts, strict=True)):
            is_last = index == len(tokens) - 1
            text.ended_before = is_last and added.before is not None
            if added.logprobs:
                logprob = added.logprobs[index] if math.isfinite(added.logprobs[index]) else None
                text.stats.constraint_logprob = self.constraint_logprobs[start + index + 1 - n_prompt] = logprob
            if not text.ended_before:
                text.token_ids.append(token_id)
                if decoder.logprobs:
                    text.logprob_sum = (text.logprob_sum or 0.0) + decoder.logprobs[index].logprob
            if is_last and added.reason is not None:
                text.stop_string, text.finish_reason = decoder.ending.text.stopped, added.reason
                decoder.ending.note(text, added)
                new_text += decoder.ending.text.finish()
                self.is_finished = True
            if new_text or not text.ended_before:
                if decoder.logprobs:
                    chosen = decoder.logprobs[index]
                    yield TokenOutput(token_id, new_text, chosen.logprob, chosen.top)
                else:
                    yield TokenOutput(token_id, new_text)

    def outputs_begun(self) -> Iterator[TokenOutput]:
        """Yield the tokens that the text was begun with in an earlier request; none where it was not."""
        if begun := self.text.request.begun_ids:
            n_prompt = len(self.text.request.prompt_ids)
            self.decoder.added = self.decoder.ending.begin(begun, n_prompt)
            yield from self.outputs(n_prompt)

    def shorten(self, outputs: list[TokenOutput], n_drawn: int) -> None:
        """Leave out what was drawn behind the first `n_drawn` tokens, of the text and of its outputs; it is cancelled.

        The state is the one that it had then, but for the counts and times of the statistics.
        """
        text = self.text
        if text.n_drawn > n_drawn:
            del outputs[n_drawn:], text.token_ids[len(text.request.prompt_ids) + n_drawn :]
            text.ended_before, text.stop_string, text.stats.chance_right = False, None, None
            text.is_whole = None if text.is_whole is None else False
            text.stats.constraint_logprob = self.constraint_logprobs.get(n_drawn)
            if text.logprob_sum is not None:
                logprobs = [output.logprob for output in outputs if output.logprob is not None]
                text.logprob_sum = reduce(add, logprobs, 0.0) if logprobs else None
            self.is_finished = False
        text.finish_reason = "cancelled"

    def held_output(self) -> Iterator[TokenOutput]:
        """Yield the text that was held back, where there is some, at the end of a text that no step has ended."""
        if self.is_finished:
            return
        self.is_finished = True
        text, piece = self.text, self.decoder.ending.piece
        stream = TextStream(text.request.sampling.stop)
        for token_id in text.token_ids[len(text.request.prompt_ids) :]:  # a step may have taken more of them
            stream.feed(piece(token_id))
        if text.token_ids and (held := stream.finish()):
            yield TokenOutput(text.token_ids[-1], held)

    def close(self) -> None:
        """Note in the statistics what became of the drafts, and let the drafters and the grammar go."""
        decoder, stats = self.decoder, self.text.stats
        if decoder.constraint is not None:
            decoder.constraint.end_at(self.text.n_drawn)
            decoder.constraint.close()
        if decoder.policy is not None and self.drafting is not None:
            if decoder.curve is not None:
                stats.curve = decoder.curve.table()
            head = decoder.session.draft_head
            stats.explanation = [*decoder.policy.explain(), *(() if head is None else head.notes)]
            for sentence in decoder.policy.unused():
                stats.add_reason(sentence)
            self.drafting.end(decoder.policy)
        stats.n_generated_tokens = self.text.n_generated


def generation_of(text: TextState, outputs: list[TokenOutput]) -> Generation:
    """Return what was generated so far; the finish_reason is "cancelled" where the text has not ended."""
    n_prompt = len(text.request.prompt_ids)
    return Generation(
        text="".join(output.text for output in outputs),
        token_ids=tuple(text.token_ids[n_prompt:]),
        finish_reason=text.finish_reason or "cancelled",
        is_whole=text.is_whole,
        stop_string=text.stop_string,
        stats=text.stats,
        outputs=tuple(outputs),
        logprob_sum=text.logprob_sum,
    )


class TextLoop:
    """Makes the steps of a single text, on a session of its own; TextBatch makes those of several texts.

    Attributes:
        live: The texts that are being written.
        is_cancelled: Whether a forward was cancelled.
    """

    def __init__(self, watch: Watch | None, started: float, live: Sequence[TextRun] = ()) -> None:
        """Begin with the texts `live`, whose request came at `started` (perf_counter); `watch` sheds memory."""
        self.live = list(live)
        self.is_cancelled = False
        self._watch = watch
        self._started = started

    def stepped(self) -> list[tuple[TextRun, Iterator[TokenOutput]]]:
        """Make a step of every text, and return each text with an iterator of its new tokens.

        A text holds those of its tokens that were read from its iterator.

        Raises:
            EdgedecError: The runtime failed, a grammar's limits were met, or there is no room for a first token.
        """
        for sentence in () if self._watch is None else self._watch.check():
            for run in self.live:
                run.text.stats.add_note(sentence)
        outputs, runs = list[tuple[TextRun, Iterator[TokenOutput]]](), [*self.live]
        for steps in self._prepared():
            group, runs = runs[: len(steps)], runs[len(steps) :]
            begun = perf_counter()
            try:
                steps, forwards = evaluated(steps, self._evaluate)
            except (CancelledError, ContextFullError, MemoryCapError) as error:
                self.end(group, error)
                if self.is_cancelled:
                    break
                continue
            seconds = perf_counter() - begun
            for run, its, forward in zip(group, steps, forwards, strict=True):
                text, n_before = run.text, len(run.text.token_ids)
                take(its, forward, seconds)
                if not text.stats.first_token_s and not text.request.begun_ids:
                    text.stats.first_token_s = perf_counter() - self._started
                outputs.append((run, run.outputs(n_before)))
        return outputs

    def _prepared(self) -> Iterable[list[Prepared]]:
        """Return the steps to make, those of one forward together, in the order of the texts."""
        (run,) = self.live
        text, decoder = run.text, run.decoder
        if text.request.pictures:
            read_pictures(text, decoder.session, decoder.on_progress)
        if text.n_cached < len(text.token_ids) - 1:
            reread(text, decoder.session, decoder.on_progress)
        return [[prepare(text, decoder)]]

    _evaluate = staticmethod(alone)

    def end(self, runs: Sequence[TextRun], error: EdgedecError) -> None:
        """End texts whose forward failed: all where it was cancelled, these where there is no room for their tokens.

        Any other error is raised, and so is this one where none of the texts has a token yet.
        """
        if isinstance(error, CancelledError):
            self.is_cancelled = True
            for run in self.live:
                run.text.finish_reason = run.text.finish_reason or "cancelled"
            return
        why = self._why_full(error)
        if not why or not any(run.text.n_generated for run in runs):
            raise error
        for run in runs:
            run.text.stats.add_note(why)
            run.text.finish_reason = "length"
            run.decoder.ending.note_grammar(run.text, "length")

    def _why_full(self, error: EdgedecError) -> str:
        """Return why texts end that have no room for their next tokens; empty where the error is to be raised."""
        full = isinstance(error, ContextFullError)  # other sessions on the same KV pool have taken the cells
        return "the text ends because the KV cache is full" if full else ""


class TokenStream(Stream[TokenOutput]):
    """Yields tokens as they are generated. Closing or dropping the stream stops the generation.

    One thread at a time reads a stream: a second one gets a SessionError. Closing the model ends the stream, also while
    the stream is paused. `generation` can be read at any time.
    """

    def __init__(
        self,
        pool: SessionPool[SessionSlot],
        request: Request,
        cancel: CancelToken | None = None,
        on_progress: OnProgress | None = None,
        constraint: Constraint | None = None,
    ) -> None:
        super().__init__(cancel)
        slot = pool.slots[0]
        if request.prompt_ids or cancel is None or not cancel.cancelled:  # else it was cancelled during rendering
            check_request(request, slot.session, constraint)
        self._text = begun(request, slot, constraint)
        self._outputs: list[TokenOutput] = []
        self.read_from(_run(pool, self._text, self.stop, on_progress, constraint, weakref.ref(self)))

    def _note(self, item: TokenOutput) -> None:
        self._outputs.append(item)

    @property
    def generation(self) -> Generation:
        """What was generated so far; the finish_reason is "cancelled" until the stream has ended."""
        return generation_of(self._text, self._outputs)


def finished(stream: TokenStream) -> Generation:
    """Read a stream to its end and return what it generated."""
    for _ in stream:
        pass
    return stream.generation


def begun(request: Request, slot: SessionSlot, constraint: Constraint | None) -> TextState:
    """Return the state of a text before its first token, and tell its grammar how long the text may be."""
    if constraint is not None:
        room, max_tokens = slot.session.n_ctx - len(request.prompt_ids), request.sampling.max_tokens
        constraint.begin(room if max_tokens is None else min(room, max_tokens))
    card = slot.session.model.card
    stats = DecodeStats(card.runtime, slot.runtime_reason, request.seed, card.lossy)
    stats.n_prompt_tokens = len(request.prompt_ids)
    adapters = zip(card.adapters, request.scales, strict=False)
    used = [f"{Path(name).name} × {scale:g}" for name, scale in adapters if scale]
    for note in (stats.lossy, f"with {', '.join(used)}" if used else "", *slot.notes):
        if note:
            stats.add_note(note)
    is_whole = None if constraint is None else False
    return TextState(request, [*request.prompt_ids, *request.begun_ids], stats=stats, is_whole=is_whole)


def check_request(request: Request, session: Session, constraint: Constraint | None) -> None:
    """Raise RequestError or PromptTooLongError for a request that the session can't take."""
    n_vocab, n_prompt = session.model.card.n_vocab, len(request.prompt_ids)
    if not n_prompt:
        raise RequestError("the prompt is empty; give at least one token")
    require_pictures(request, session)
    tokens = [token_id for token_id in request.prompt_ids if token_id >= 0 or not request.pictures]
    if not all(0 <= token_id < n_vocab for token_id in (*tokens, *request.begun_ids)):
        raise RequestError(f"the prompt holds a token id outside the vocabulary of {n_vocab}")
    if constraint is not None:
        for name in ("ignore_end", "stop_unsure"):
            if getattr(request.sampling, name):
                raise RequestError(
                    f"a grammar decides where the text ends, so {argument(name)} can't be kept: leave one of them out"
                )
    if n_prompt >= (most := session.n_ctx):
        raise too_long(n_prompt, most - 1, session.model.card.n_ctx_train)
    if n_prompt + (n_begun := len(request.begun_ids)) > most:
        raise RequestError(f"the prompt's {n_prompt} tokens and the {n_begun} to resume are over the context of {most}")


def _run(
    pool: SessionPool[SessionSlot],
    text: TextState,
    cancel: CancelToken,
    on_progress: OnProgress | None,
    constraint: Constraint | None,
    stream: "weakref.ref[TokenStream]",
) -> Generator[TokenOutput]:
    """Wait for a session, the one that holds most of the prompt, and yield tokens until something ends the text."""
    started = perf_counter()
    with session_for(pool, text.request, cancel, stream) as slot:
        if slot is None:
            text.finish_reason = "cancelled"
            text.stats.total_s = perf_counter() - started
        else:
            yield from decoded(slot, text, cancel, on_progress, constraint, started)


def decoded(
    slot: SessionSlot,
    text: TextState,
    cancel: CancelToken,
    on_progress: OnProgress | None,
    constraint: Constraint | None,
    started: float,
) -> Generator[TokenOutput]:
    """Yield the tokens of a generation on a session; in the end note what happened to the session and the drafters."""
    try:
        if slot.prefixes is not None and not text.request.begun_ids:  # those come before the prompt is read
            slot.prefixes.begin(slot, text.request.prompt_ids, cancel)
        request = text.request
        with slot.session.generating(len(request.prompt_ids), request.sampling, request.seed, text.stats):
            reuse_prefix(slot, text)
            if slot.prefixes is not None:
                on_progress = slot.prefixes.noting(slot, text.request.prompt_ids, on_progress)
            run = open_run(slot, text, slot.session, slot.curve, constraint, on_progress=on_progress)
            try:
                yield from _steps(slot, run, cancel, started)
            finally:
                remember_cached(slot, text)
                run.close()
    finally:
        slot.reading = ()
        text.stats.total_s = perf_counter() - started
        text.stats.n_generated_tokens = text.n_generated


def _steps(slot: SessionSlot, run: TextRun, cancel: CancelToken, started: float) -> Iterator[TokenOutput]:
    """Yield the tokens of step after step, until something ends the text; the generation was `started` then."""
    text, loop = run.text, TextLoop(slot.watch, started, [run])
    waiting = Waiting(slot.wait_s, cancel, run.decoder.on_progress)
    yield from run.outputs_begun()
    while text.finish_reason is None:
        if cancel.cancelled:
            text.finish_reason = "cancelled"
            break
        is_first = len(text.token_ids) == len(text.request.prompt_ids)
        try:
            for _, outputs in loop.stepped():
                waiting.over()
                if is_first:
                    remember_cached(slot, text)  # now, as others may take the prompt over
                    slot.reading = ()
                for output in outputs:
                    yield output
                    if cancel.cancelled and text.finish_reason is None:  # the rest of the step is no longer wanted
                        text.finish_reason = "cancelled"
                        break
        except RuntimeLostError as error:
            text.n_cached = min(text.n_cached, slot.session.n_cached)
            text.stats.n_reused_tokens = min(text.stats.n_reused_tokens, text.n_cached)
            try:
                waiting.pause(error)
            except RuntimeLostError as final:
                final.token_ids = tuple(text.token_ids[len(text.request.prompt_ids) :])
                raise
        except (CancelledError, ContextFullError) as error:  # of what a loss made to be read again
            loop.end([run], error)
    yield from run.held_output()


def open_run(
    slot: SessionSlot,
    text: TextState,
    session: Session,
    curve: CostCurve,
    constraint: Constraint | None,
    *,
    on_progress: OnProgress | None = None,
) -> TextRun:
    """Open the drafters of a text, and return the run that writes the text on a slot that nobody else uses meanwhile.

    `session` is the slot's or a fork of it, `curve` the measured cost of its forwards. The prefill calls `on_progress`.
    """
    request, drafting = text.request, slot.drafting
    decoder = Decoder(
        session,
        Noise(request.seed),
        None if drafting is None else curve,
        ending=TextEnd.of(request, session, constraint),
        on_progress=on_progress,
        constraint=constraint,
        forward_rows=slot.forward_rows,
        takes_best=request.sampling.takes_best and constraint is None,
    )
    if request.rule != COUPLED:
        text.stats.add_note(f"verified by {request.rule}: a text of the same distribution, not plain decoding's own")
        if drafting is None or not request.draft:
            text.stats.add_reason(f"the rule {request.rule} gains nothing: nothing is drafted")
    for early in decoder.ending.early:
        if early.note:
            text.stats.add_note(early.note)
    if drafting is not None and request.draft:
        decoder.strict = drafting.strict and session.model.batch_invariant is not True
        decoder.policy = open_policy(drafting, session, curve, text, decoder.noise, constraint)
        if decoder.policy is not None and constraint is not None:
            from edgedec.scheduler.jump_forward import ForcedDrafts

            prices = None if drafting.always else curve
            decoder.forced = ForcedDrafts(constraint, drafting.n_max, prices, coupled=request.rule == COUPLED)
    return TextRun(text, decoder, drafting)


class Waiting:
    """The waiting of one text. The time counts from a loss to the next step that succeeds."""

    def __init__(self, wait_s: float, cancel: CancelToken, on_progress: OnProgress | None) -> None:
        """`wait_s` is the most seconds to wait after a loss; `cancel` ends a pause."""
        self._wait_s, self._cancel, self._on_progress = wait_s, cancel, on_progress
        self._first: RuntimeLostError | None = None
        self._since = 0.0

    def pause(self, error: RuntimeLostError) -> None:
        """Wait a moment before the next try to go on.

        Raises:
            RuntimeLostError: The time is over. Where there was time, the error says what was lost at first, and what
                is missing now.
        """
        if self._cancel.cancelled:
            return
        if self._wait_s <= 0:
            raise error
        if self._first is None:
            self._first, self._since = error, monotonic()
            limit = "" if math.isinf(self._wait_s) else f" up to {self._wait_s:g} s"
            logger.warning(
                "%s; waiting%s until the model can be loaded again, then the text goes on", error.loss, limit
            )
            report_progress(self._on_progress, _PHASE, 0, None, "")
            return  # the first try comes at once: a server may have been started again by a supervisor
        if monotonic() - self._since >= self._wait_s:
            now = "" if error.loss == self._first.loss else f"; now: {error.loss}"
            raise RuntimeLostError(f"{self._first.loss}; {self._wait_s:g} s were waited in vain{now}") from error
        until = min(self._since + self._wait_s, monotonic() + _PAUSE_S)
        while not self._cancel.cancelled and monotonic() < until:
            sleep(_POLL_S)

    def over(self) -> None:
        """Note that the model is back."""
        if self._first is not None:
            self._first = None
            report_progress(self._on_progress, _PHASE, 1, 1, "")
            logger.warning("the model is loaded again; the text goes on")
