"""One generation from its request to its last token, as a stream."""

import os
import weakref
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from time import perf_counter

from edgedec.constraint import Constraint
from edgedec.cost_curve import CostCurve
from edgedec.decoding.detokenizer import TextStream
from edgedec.decoding.ending import TextEnd
from edgedec.decoding.one_reader import OneReader, Visit
from edgedec.decoding.prompt_length import too_long
from edgedec.decoding.session_pool import SessionPool
from edgedec.decoding.step import Decoder, step
from edgedec.errors import CancelledError, ContextFullError, RequestError, SessionError, argument
from edgedec.layer_skip.skipping_model import lossy_note
from edgedec.memory.watch import Watch
from edgedec.model import Session
from edgedec.noise import Noise
from edgedec.progress import CancelToken, OnProgress
from edgedec.scheduler.drafter_set import Drafting, open_policy
from edgedec.scheduler.jump_forward import ForcedDrafts
from edgedec.sequence import COUPLED, Generation, Request, Sequence, TokenOutput
from edgedec.stats import DecodeStats


@dataclass(slots=True)
class SessionSlot:
    """A session and what its KV cache holds, for the generations that take turns on it.

    Attributes:
        session: The target's session.
        cached_ids: The tokens in the session's KV cache.
        n_exact: How many of these, from the start, a cold start would compute to the same bits.
        curve: Measured cost of the session's forwards.
        drafting: What the generations draft with, or None.
        pid: The process that opened the session.
        closing: Set once the model is being closed; later generations are refused.
        stream: The stream that holds the slot, also while the stream is paused; None while the slot is free.
        runtime_reason: What a comparison of runtimes found; may be empty.
        watch: Sheds memory when memory runs short, or None.
        forward_rows: Most rows of a forward that verifies, where memory is planned, or None.
        notes: Sentences for the statistics of every text.
    """

    session: Session
    cached_ids: list[int] = field(default_factory=list)
    n_exact: int = 0
    curve: CostCurve = field(default_factory=CostCurve)
    drafting: Drafting | None = None
    pid: int = field(default_factory=os.getpid)
    closing: bool = False
    stream: "weakref.ref[TokenStream] | None" = None
    runtime_reason: str = ""
    watch: Watch | None = None
    forward_rows: int | None = None
    notes: tuple[str, ...] = ()


class TokenStream(Iterator[TokenOutput]):
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
        target = pool.slots[0]
        if cancel is not None and not isinstance(cancel, CancelToken):
            raise RequestError(f"cancel is a {type(cancel).__name__}; it must be an edgedec.CancelToken")
        if request.prompt_ids or cancel is None or not cancel.cancelled:  # else it was cancelled during rendering
            _check_request(request, target.session, constraint)
        self._reader = OneReader()
        self._stop = CancelToken()  # of this stream alone; `cancel` may be shared with others
        if constraint is not None:
            room, max_tokens = target.session.n_text_max - len(request.prompt_ids), request.sampling.max_tokens
            constraint.begin(room if max_tokens is None else min(room, max_tokens))
        card = target.session.model.card
        stats = DecodeStats(card.runtime, target.runtime_reason, request.seed, lossy_note(card))
        stats.n_prompt_tokens = len(request.prompt_ids)
        for note in (stats.lossy, *target.notes):
            if note:
                stats.add_reason(note)
        is_whole = None if constraint is None else False
        self._sequence = Sequence(request, list(request.prompt_ids), stats=stats, is_whole=is_whole)
        self._outputs: list[TokenOutput] = []
        tokens = _run(pool, self._sequence, self._stop, on_progress, constraint, weakref.ref(self))
        self._tokens = tokens if cancel is None else _stopped_by(cancel, self._stop, tokens)

    def __next__(self) -> TokenOutput:
        visit = Visit()
        try:
            self._reader.enter(visit)
            output = next(self._tokens)
            self._outputs.append(output)
            return output
        finally:
            self._reader.leave(visit)

    def cancel(self) -> None:
        """Stop the generation, from any thread; the stream then ends with the finish_reason "cancelled"."""
        self._stop.cancel()

    def close(self) -> None:
        """Stop the generation and free its session, from any thread; calling close() again does nothing.

        A thread that is reading comes to the end of the stream first. From a callback of the stream itself, close()
        only stops the generation; the session is free when the reader has come to the end.
        """
        self._stop.cancel()
        if not self._reader.is_here:
            with self._reader.closing(self._stop.cancel):
                self._tokens.close()

    def close_soon(self, then: Callable[[], None]) -> bool:
        """Stop the generation from a callback of the stream; return False, and do nothing, elsewhere.

        `then` is called after the step that called the callback.
        """
        if not self._reader.is_here:
            return False
        self._stop.cancel()
        self._reader.afterwards(then)
        return True

    @property
    def generation(self) -> Generation:
        """What was generated so far; the finish_reason is "cancelled" until the stream has ended."""
        sequence = self._sequence
        n_prompt = len(sequence.request.prompt_ids)
        return Generation(
            text="".join(output.text for output in self._outputs),
            token_ids=tuple(sequence.token_ids[n_prompt:]),
            finish_reason=sequence.finish_reason or "cancelled",
            is_whole=sequence.is_whole,
            stop_string=sequence.stop_string,
            stats=sequence.stats,
            outputs=tuple(self._outputs),
            proposals=tuple(sequence.proposals),
        )


def _check_request(request: Request, session: Session, constraint: Constraint | None) -> None:
    """Raise RequestError or PromptTooLongError for a request that the session can't take."""
    n_vocab, n_prompt = session.model.card.n_vocab, len(request.prompt_ids)
    if not n_prompt:
        raise RequestError("the prompt is empty; give at least one token")
    if not all(0 <= token_id < n_vocab for token_id in request.prompt_ids):
        raise RequestError(f"the prompt holds a token id outside the vocabulary of {n_vocab}")
    if constraint is not None:
        for name in ("ignore_end", "stop_unsure"):
            if getattr(request.sampling, name):
                raise RequestError(
                    f"a grammar decides where the text ends, so {argument(name)} can't be kept: leave one of them out"
                )
    if n_prompt >= (most := session.n_text_max):
        raise too_long(n_prompt, most - 1)


def _run(
    pool: SessionPool[SessionSlot],
    sequence: Sequence,
    cancel: CancelToken,
    on_progress: OnProgress | None,
    constraint: Constraint | None,
    stream: "weakref.ref[TokenStream]",
) -> Generator[TokenOutput]:
    """Wait for a session, the one that holds most of the prompt, and yield tokens until something ends the text."""
    if os.getpid() != pool.slots[0].pid:
        raise SessionError("the model was loaded before fork(); a child process must load its own")
    started = perf_counter()
    with pool.turn(cancel, lambda target: _n_shared(target, sequence)) as target:
        try:
            if target is None:
                sequence.finish_reason = "cancelled"
            else:
                target.stream = stream  # first: whoever closes the model sets `closing`, then looks for streams
                if target.closing:
                    raise SessionError("the model is closed; load it again")
                n_prompt = len(sequence.request.prompt_ids)
                with cancel.calling(target.session.cancel), target.session.generating(n_prompt):
                    yield from _decode(target, sequence, cancel, on_progress, constraint, started)
        finally:
            if target is not None:
                target.stream = None
            sequence.stats.total_s = perf_counter() - started
            sequence.stats.n_generated_tokens = sequence.n_generated


def _stopped_by(cancel: CancelToken, stop: CancelToken, tokens: Generator[TokenOutput]) -> Generator[TokenOutput]:
    """Yield `tokens`; while they are read, cancelling `cancel` also cancels `stop`."""
    with cancel.calling(stop.cancel):
        if cancel.cancelled:
            stop.cancel()
        yield from tokens


def _decode(
    target: SessionSlot,
    sequence: Sequence,
    cancel: CancelToken,
    on_progress: OnProgress | None,
    constraint: Constraint | None,
    started: float,
) -> Iterator[TokenOutput]:
    """Yield the tokens of a generation on a session; in the end note what happened to the session and the drafters."""
    _reuse_prefix(target, sequence)
    decoder = _decoder(target, sequence, on_progress, constraint)
    text = TextStream(sequence.request.sampling.stop)
    try:
        yield from _steps(target, sequence, decoder, text, cancel, started)
    finally:
        if constraint is not None:
            constraint.close()
        _remember_cached(target, sequence)
        if decoder.policy is not None:
            sequence.stats.curve = target.curve.table()
            sequence.stats.explanation = decoder.policy.explain()
            for sentence in decoder.policy.unused():
                sequence.stats.add_reason(sentence)
            decoder.policy.drafters.close()
        if target.drafting is not None:
            target.drafting.policy = None
        target.session.count_text(sequence.stats, sequence.n_generated)


def _steps(
    target: SessionSlot, sequence: Sequence, decoder: Decoder, text: TextStream, cancel: CancelToken, started: float
) -> Iterator[TokenOutput]:
    """Yield the tokens of step after step, until something ends the text; the generation was `started` then."""
    while sequence.finish_reason is None:
        if cancel.cancelled:
            sequence.finish_reason = "cancelled"
            break
        if target.watch is not None:
            for sentence in target.watch.check():
                sequence.stats.add_reason(sentence)
        n_before = len(sequence.token_ids)
        try:
            step(sequence, decoder)
        except CancelledError:
            sequence.finish_reason = "cancelled"
            break
        except ContextFullError:  # other sessions on the same KV pool may have taken the cells
            if sequence.n_generated == 0:
                raise
            sequence.stats.add_reason("the text ends because the KV cache is full")
            sequence.finish_reason = "length"
            decoder.ending.note_grammar(sequence, "length")
            break
        if n_before == len(sequence.request.prompt_ids):
            sequence.stats.first_token_s = perf_counter() - started
        for output in _outputs(sequence, decoder, text, n_before):
            yield output
            if cancel.cancelled and sequence.finish_reason is None:  # the rest of the step is no longer wanted
                sequence.finish_reason = "cancelled"
                break
    if sequence.finish_reason == "cancelled" and (held := text.finish()):
        yield TokenOutput(sequence.token_ids[-1], held)


def _outputs(sequence: Sequence, decoder: Decoder, text: TextStream, start: int) -> Iterator[TokenOutput]:
    """Yield the tokens that a step added after the first `start` tokens, up to the one that ends the text."""
    tokenizer, ending = decoder.session.model.tokenizer, decoder.ending
    added = sequence.token_ids[start:]
    del sequence.token_ids[start:]
    for index, token_id in enumerate(added):
        is_last, new_text = index == len(added) - 1, ""
        end = decoder.end if is_last else None
        if end is None:
            sequence.token_ids.append(token_id)
            new_text = text.feed(tokenizer.piece(token_id))
        sequence.stop_string = text.stopped
        stopped = text.stopped is not None
        sequence.finish_reason = ending.reason(sequence, end=end, stopped=stopped, is_last=is_last)
        if sequence.finish_reason is not None:
            new_text += text.finish()
        if new_text or end is None:
            if decoder.logprobs:
                chosen = decoder.logprobs[index]
                yield TokenOutput(token_id, new_text, chosen.logprob, chosen.top)
            else:
                yield TokenOutput(token_id, new_text)
        if sequence.finish_reason is not None:
            return


def _n_common(held: list[int], prompt: tuple[int, ...], limit: int) -> int:
    """Return how many tokens two texts have in common from their start on, at most `limit`."""
    n = 0
    while n < min(len(held), len(prompt), limit) and held[n] == prompt[n]:
        n += 1
    return n


def _n_shared(target: SessionSlot, sequence: Sequence) -> float:
    """Return how many tokens of a prompt a session holds already; of equals the emptier counts as more."""
    held = target.cached_ids
    return _n_common(held, sequence.request.prompt_ids, len(held)) - len(held) / (len(held) + 1)


def _reuse_prefix(target: SessionSlot, sequence: Sequence) -> None:
    """Count how much of the KV cache the prompt shares; its last token is always evaluated, for the logits."""
    prompt, capabilities = sequence.request.prompt_ids, target.session.model.capabilities
    limit = min(len(prompt) - 1, target.session.n_cached)
    chunk = 1
    if sequence.request.reuse == "exact":
        limit, chunk = min(limit, target.n_exact), capabilities.prefill_chunk
    n = _n_common(target.cached_ids, prompt, limit) // chunk * chunk
    if not capabilities.rollback and n != target.session.n_cached:
        n = 0
    sequence.n_cached = sequence.stats.n_reused_tokens = n


def _remember_cached(target: SessionSlot, sequence: Sequence) -> None:
    """Note what the KV cache holds now, and how much of that a cold start would compute to the same bits."""
    n_start, n_prompt = sequence.stats.n_reused_tokens, len(sequence.request.prompt_ids)
    chunk = target.session.model.capabilities.prefill_chunk
    target.cached_ids = sequence.token_ids[: sequence.n_cached]
    n_cached = len(target.cached_ids)
    if n_start <= target.n_exact and n_start % chunk == 0:
        whole = n_cached if chunk == 1 else min(n_cached, n_prompt)
        target.n_exact = whole // chunk * chunk
    else:
        target.n_exact = min(target.n_exact, n_start)


def _decoder(
    target: SessionSlot, sequence: Sequence, on_progress: OnProgress | None, constraint: Constraint | None
) -> Decoder:
    """Return what a sequence is decoded with on a session, its drafters opened."""
    request, drafting = sequence.request, target.drafting
    decoder = Decoder(
        target.session,
        Noise(request.seed),
        None if drafting is None else target.curve,
        ending=TextEnd.of(request, target.session, constraint),
        on_progress=on_progress,
        constraint=constraint,
        forward_rows=target.forward_rows,
    )
    if request.rule != COUPLED:
        sequence.stats.add_reason(
            f"verified by {request.rule}: a text of the same distribution, not plain decoding's own"
        )
    if decoder.ending.unsure is not None and decoder.ending.unsure.note:
        sequence.stats.add_reason(decoder.ending.unsure.note)
    if drafting is not None and request.draft:
        decoder.strict = drafting.strict
        decoder.policy = open_policy(drafting, target.session, target.curve, sequence, decoder.noise, constraint)
        if decoder.policy is not None and constraint is not None:
            prices = None if drafting.always else target.curve
            decoder.forced = ForcedDrafts(constraint, drafting.n_max, prices, coupled=request.rule == COUPLED)
    return decoder
