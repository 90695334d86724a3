"""The decode loop: step after step of the texts that are written together, which may be a single one.

Each text is drafted, verified and learned from by itself (step.py); only the forward is common. So a text has the bits
that it would have alone.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from time import perf_counter

from edgedec.decoding.ending import TextStream
from edgedec.decoding.reading import read_pictures, reread
from edgedec.decoding.step import Decoder, Prepared, alone, evaluated, prepare, take
from edgedec.errors import CancelledError, ContextFullError, EdgedecError, MemoryCapError
from edgedec.memory.shedding import Watch
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Generation, TextState, TokenOutput


@dataclass(eq=False, slots=True)
class TextRun:
    """A text while it is written.

    Attributes:
        text: The text's state.
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

    def end_full(self, why: str) -> None:
        """End the text where it is, with a sentence that says why it can't be longer."""
        self.text.stats.add_note(why)
        self.text.finish_reason = "length"
        self.decoder.ending.note_grammar(self.text, "length")

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
        found, runs = list[tuple[TextRun, Iterator[TokenOutput]]](), [*self.live]
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
                found.append((run, run.outputs(n_before)))
        return found

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
            run.end_full(why)

    def _why_full(self, error: EdgedecError) -> str:
        """Return why texts end that have no room for their next tokens; empty where the error is to be raised."""
        full = isinstance(error, ContextFullError)  # other sessions on the same KV pool have taken the cells
        return "the text ends because the KV cache is full" if full else ""
