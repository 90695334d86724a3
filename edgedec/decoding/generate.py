"""One generation from its request to its last token, as a stream."""

import logging
import math
import weakref
from collections.abc import Generator, Iterator
from pathlib import Path
from time import monotonic, perf_counter, sleep

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.decoding.ending import TextEnd
from edgedec.decoding.prompt_length import too_long
from edgedec.decoding.reading import remember_cached, require_pictures, reuse_prefix
from edgedec.decoding.session_pool import SessionPool, SessionSlot, session_for
from edgedec.decoding.step import Decoder
from edgedec.decoding.stream import Stream
from edgedec.decoding.text_loop import TextLoop, TextRun, generation_of
from edgedec.errors import (
    CancelledError,
    ContextFullError,
    RequestError,
    RuntimeLostError,
    argument,
)
from edgedec.model import Session
from edgedec.progress import CancelToken, OnProgress, report_progress
from edgedec.sampling import Noise
from edgedec.scheduler.drafter_set import open_policy
from edgedec.sequence import COUPLED, Generation, Request, TextState, TokenOutput
from edgedec.stats import DecodeStats

logger = logging.getLogger("edgedec.decoding.generate")
_PAUSE_S = 1.0
_POLL_S = 0.05
_PHASE = "waiting for the model's machines"


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
    """Return a text that is about to be written, its drafters opened.

    Args:
        slot: The slot whose turn it is.
        text: The text.
        session: The session that it is written on: the slot's, or a fork of it.
        curve: The measured cost of that session's forwards.
        constraint: The grammar that the text keeps to, or None.
        on_progress: Called during the prefill.
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
            logger.warning("%s", self._sentence(error))
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

    def _sentence(self, error: RuntimeLostError) -> str:
        limit = "" if math.isinf(self._wait_s) else f" up to {self._wait_s:g} s"
        return f"{error.loss}; waiting{limit} until the model can be loaded again, then the text goes on"
