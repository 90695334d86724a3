"""One text while it is written: its state, what it is decoded with, and the text that has become certain."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import reduce
from operator import add

from edgedec.decoding.detokenizer import TextStream
from edgedec.decoding.step import Decoder
from edgedec.scheduler.drafter_set import Drafting
from edgedec.sequence import Generation, Sequence, TokenOutput


@dataclass(slots=True)
class TextRun:
    """A text while it is written.

    Attributes:
        sequence: The text's state.
        decoder: What the text is decoded with.
        drafting: What opened its drafters, or None.
        is_finished: Whether no text is held back any more.
        constraint_logprobs: By how many tokens were drawn, what `stats.constraint_logprob` was then.
    """

    sequence: Sequence
    decoder: Decoder
    drafting: Drafting | None = None
    is_finished: bool = False
    constraint_logprobs: dict[int, float | None] = field(default_factory=dict)

    def outputs(self, start: int) -> Iterator[TokenOutput]:
        """Yield the tokens that a step added after the first `start` tokens; the text holds those that were yielded."""
        sequence, decoder, added = self.sequence, self.decoder, self.decoder.added
        tokens, n_prompt = added.verification.token_ids, len(sequence.request.prompt_ids)
        del sequence.token_ids[start:]
        for index, (token_id, new_text) in enumerate(zip(tokens, added.texts, strict=True)):
            is_last = index == len(tokens) - 1
            sequence.ended_before = is_last and added.before is not None
            if added.logprobs:
                logprob = added.logprobs[index] if math.isfinite(added.logprobs[index]) else None
                sequence.stats.constraint_logprob = self.constraint_logprobs[start + index + 1 - n_prompt] = logprob
            if not sequence.ended_before:
                sequence.token_ids.append(token_id)
                if decoder.logprobs:
                    sequence.logprob_sum = (sequence.logprob_sum or 0.0) + decoder.logprobs[index].logprob
            if is_last and added.reason is not None:
                sequence.stop_string, sequence.finish_reason = decoder.ending.text.stopped, added.reason
                decoder.ending.note(sequence, added)
                new_text += decoder.ending.text.finish()
                self.is_finished = True
            if new_text or not sequence.ended_before:
                if decoder.logprobs:
                    chosen = decoder.logprobs[index]
                    yield TokenOutput(token_id, new_text, chosen.logprob, chosen.top)
                else:
                    yield TokenOutput(token_id, new_text)

    def outputs_begun(self) -> Iterator[TokenOutput]:
        """Yield the tokens that the text was begun with in an earlier request; none where it was not."""
        if begun := self.sequence.request.begun_ids:
            n_prompt = len(self.sequence.request.prompt_ids)
            self.decoder.added = self.decoder.ending.begin(begun, n_prompt)
            yield from self.outputs(n_prompt)

    def end_full(self, why: str) -> None:
        """End the text where it is, with a sentence that says why it can't be longer."""
        self.sequence.stats.add_reason(why)
        self.sequence.finish_reason = "length"
        self.decoder.ending.note_grammar(self.sequence, "length")

    def shorten(self, outputs: list[TokenOutput], n_drawn: int) -> None:
        """Leave out what was drawn behind the first `n_drawn` tokens, of the text and of its outputs; it is cancelled.

        The state is the one that it had then, but for the counts and times of the statistics.
        """
        sequence = self.sequence
        if sequence.n_drawn > n_drawn:
            del outputs[n_drawn:], sequence.token_ids[len(sequence.request.prompt_ids) + n_drawn :]
            sequence.ended_before, sequence.stop_string, sequence.stats.chance_right = False, None, None
            sequence.is_whole = None if sequence.is_whole is None else False
            sequence.stats.constraint_logprob = self.constraint_logprobs.get(n_drawn)
            if sequence.logprob_sum is not None:
                logprobs = [output.logprob for output in outputs if output.logprob is not None]
                sequence.logprob_sum = reduce(add, logprobs, 0.0) if logprobs else None
            self.is_finished = False
        sequence.finish_reason = "cancelled"

    def held_output(self) -> Iterator[TokenOutput]:
        """Yield the text that was held back, where there is some, at the end of a text that no step has ended."""
        if self.is_finished:
            return
        self.is_finished = True
        sequence, piece = self.sequence, self.decoder.ending.piece
        text = TextStream(sequence.request.sampling.stop)
        for token_id in sequence.token_ids[len(sequence.request.prompt_ids) :]:  # a step may have taken more of them
            text.feed(piece(token_id))
        if sequence.token_ids and (held := text.finish()):
            yield TokenOutput(sequence.token_ids[-1], held)

    def close(self) -> None:
        """Note in the statistics what became of the drafts, and let the drafters and the grammar go."""
        decoder, stats = self.decoder, self.sequence.stats
        if decoder.constraint is not None:
            decoder.constraint.end_at(self.sequence.n_drawn)
            decoder.constraint.close()
        if decoder.policy is not None and self.drafting is not None:
            if decoder.curve is not None:
                stats.curve = decoder.curve.table()
            head = self.drafting.head
            stats.explanation = [*decoder.policy.explain(), *(() if head is None else head.notes)]
            stats.saved_s = decoder.saved.seconds()
            for sentence in decoder.policy.unused():
                stats.add_reason(sentence)
            self.drafting.end(decoder.policy)
        decoder.session.count_text(stats, self.sequence.n_generated)


def generation_of(sequence: Sequence, outputs: list[TokenOutput]) -> Generation:
    """Return what was generated so far; the finish_reason is "cancelled" where the text has not ended."""
    n_prompt = len(sequence.request.prompt_ids)
    return Generation(
        text="".join(output.text for output in outputs),
        token_ids=tuple(sequence.token_ids[n_prompt:]),
        finish_reason=sequence.finish_reason or "cancelled",
        is_whole=sequence.is_whole,
        stop_string=sequence.stop_string,
        stats=sequence.stats,
        outputs=tuple(outputs),
        proposals=tuple(sequence.proposals),
        logprob_sum=sequence.logprob_sum,
    )
