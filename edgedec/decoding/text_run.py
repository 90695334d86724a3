"""One text while it is written: its state, what it is decoded with, and the text that has become certain."""

from collections.abc import Iterator
from dataclasses import dataclass

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
        text: Turns tokens into text.
        drafting: What opened its drafters, or None.
    """

    sequence: Sequence
    decoder: Decoder
    text: TextStream
    drafting: Drafting | None = None

    def outputs(self, start: int) -> Iterator[TokenOutput]:
        """Yield the tokens that a step added after the first `start` tokens, up to the one that ends the text."""
        sequence, decoder, text = self.sequence, self.decoder, self.text
        tokenizer, ending = decoder.session.model.tokenizer, decoder.ending
        added = sequence.token_ids[start:]
        del sequence.token_ids[start:]
        for index, token_id in enumerate(added):
            is_last, new_text = index == len(added) - 1, ""
            end = decoder.end if is_last else None
            if end is None:
                sequence.token_ids.append(token_id)
                new_text = text.feed(tokenizer.piece(token_id))
                if decoder.logprobs:
                    sequence.logprob_sum = (sequence.logprob_sum or 0.0) + decoder.logprobs[index].logprob
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

    def outputs_begun(self) -> Iterator[TokenOutput]:
        """Yield the tokens that the text was begun with in an earlier request; none where it was not."""
        if begun := self.sequence.request.begun_ids:
            if self.decoder.constraint is not None:
                for token_id in begun:
                    self.decoder.constraint.commit(token_id)
            yield from self.outputs(len(self.sequence.request.prompt_ids))

    def end_full(self, why: str) -> None:
        """End the text where it is, with a sentence that says why it can't be longer."""
        self.sequence.stats.add_reason(why)
        self.sequence.finish_reason = "length"
        self.decoder.ending.note_grammar(self.sequence, "length")

    def held_output(self) -> Iterator[TokenOutput]:
        """Yield the text that was held back, where there is some, at the end of a text that was cancelled."""
        if self.sequence.token_ids and (held := self.text.finish()):
            yield TokenOutput(self.sequence.token_ids[-1], held)

    def close(self) -> None:
        """Note in the statistics what became of the drafts, and let the drafters and the grammar go."""
        decoder, stats = self.decoder, self.sequence.stats
        if decoder.constraint is not None:
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
