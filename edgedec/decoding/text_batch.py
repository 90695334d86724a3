"""Several texts of one prompt that are written together: in each step, all of them have their rows in one forward.

Each text is drafted, verified and learned from by the code of a single text (step.py), on a fork of the session that
read the prompt; only the forward is common, and the calls of models that draft (joint_drafting.py). So a text has the
bits that it would have alone.
"""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from edgedec.constraint import Constraint
from edgedec.decoding.generate import SessionSlot, begun, open_run, remember_cached, reuse_prefix
from edgedec.decoding.joint_drafting import JointDrafting
from edgedec.decoding.step import Prepared, item_of, take
from edgedec.decoding.text_room import text_end, tokens_behind
from edgedec.decoding.text_run import TextRun, generation_of
from edgedec.errors import CancelledError, ContextFullError, MemoryCapError, RequestError, argument
from edgedec.model import Forward, ForwardItem
from edgedec.progress import OnProgress
from edgedec.scheduler.shared_cost_curve import curve_of_fork
from edgedec.sequence import Generation, Request, Sequence, TokenOutput
from edgedec.sessions.forks import ForkedSession, SessionForks, require_forks
from edgedec.stats import DecodeStats

OpenConstraint = Callable[[], Constraint | None]
"""Opens the grammar of one text, at its beginning."""


@dataclass(frozen=True, slots=True)
class SampleOutput:
    """One generated token of one of several texts.

    Attributes:
        text: The number of the text.
        output: The token.
    """

    text: int
    output: TokenOutput


@dataclass(eq=False, slots=True)
class _Text:
    """A text of the batch: how it is written, on which fork, and what it put out so far."""

    number: int
    run: TextRun
    session: ForkedSession
    outputs: list[TokenOutput] = field(default_factory=list)

    @property
    def sequence(self) -> Sequence:
        return self.run.sequence


_Steps = list[tuple[_Text, Prepared]]
"""Texts with their prepared steps."""


class TextBatch:
    """Texts of one prompt that are written together. One thread at a time uses a batch.

    Args:
        target: The slot whose session reads the prompt.
        request: What is generated; text k gets the seed `request.seed + k`.
        open_constraint: Opens the grammar of each text.
        started: When the request came, in seconds of perf_counter.

    Attributes:
        forks: The sessions of the texts that are being written.
        holds_ended: Whether texts that have ended are kept until settle() or end_at(), which may shorten them.
    """

    holds_ended = False

    def __init__(self, target: SessionSlot, request: Request, open_constraint: OpenConstraint, started: float) -> None:
        n_prompt = len(request.prompt_ids)
        self.forks = SessionForks(most_tokens=tokens_behind(target, n_prompt - 1), most_rows=target.text_rows)
        self._drafting = JointDrafting(self.forks)
        self._target = target
        self._request = request
        self._open_constraint = open_constraint
        self._started = started
        self._end_of_text = text_end(target, n_prompt, request.sampling.max_tokens)
        self._is_cancelled = False
        self._live: list[_Text] = []
        self._held: list[_Text] = []
        self._sequences: list[Sequence] = []
        self._outputs: list[list[TokenOutput]] = []

    @property
    def live(self) -> tuple[int, ...]:
        """The numbers of the texts that are being written."""
        return tuple(text.number for text in self._live)

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The numbers of the texts that are being written, and of those that are held."""
        return tuple(sorted(text.number for text in (*self._live, *self._held)))

    @property
    def generations(self) -> tuple[Generation, ...]:
        """What was generated of each text so far, by its number."""
        return tuple(map(generation_of, self._sequences, self._outputs))

    @property
    def n_texts(self) -> int:
        """How many texts were begun."""
        return len(self._sequences)

    @property
    def outputs(self) -> tuple[list[TokenOutput], ...]:
        """The tokens of each text so far, by its number; the lists grow while the texts are written."""
        return tuple(self._outputs)

    def n_drawn(self, number: int) -> int:
        """Return how many tokens were drawn for a text; the one before which it ended is among them."""
        return self._sequences[number].n_drawn

    def stats(self, number: int) -> DecodeStats:
        """Return the statistics of a text, which grow while it is written."""
        return self._sequences[number].stats

    def read_prompt(self, n: int, on_progress: OnProgress | None) -> None:
        """Read the prompt but for its last token, which each text evaluates, and open `n` texts.

        Raises:
            CapabilityError: The session can't be forked, or a row depends on what else is in its forward.
            CancelledError, EdgedecError: The forward was cancelled, or the runtime failed.
        """
        target, request = self._target, self._request
        require_forks(target.session.model)
        base = Sequence(request, list(request.prompt_ids))
        reuse_prefix(target, base)
        n_reused, n_read = base.n_cached, len(request.prompt_ids) - 1
        if n_reused < n_read:
            self._read(base, n_read, on_progress)
        for k in range(n):
            sequence, constraint = self._begun(request.text(k))
            sequence.n_cached = n_read
            sequence.stats.n_reused_tokens = n_read if k else n_reused
            self._open(sequence, self.forks.fork(target.session), constraint)

    def _read(self, base: Sequence, n_read: int, on_progress: OnProgress | None) -> None:
        """Read the first `n_read` tokens of the prompt, of which the session holds the first."""
        session, n_past = self._target.session, base.n_cached
        tokens, n_held = np.array(base.token_ids[n_past:n_read], np.int32), session.n_cached
        try:
            with session.generating(n_read):
                session.forward(tokens, n_past=n_past, on_progress=on_progress)
            base.n_cached = n_read
        except BaseException:  # KeyboardInterrupt too
            if session.n_cached != n_held:  # else nothing was read
                base.n_cached = min(session.n_cached, n_read)
            raise
        finally:
            remember_cached(self._target, base)

    def _begun(self, request: Request) -> tuple[Sequence, Constraint | None]:
        constraint = self._open_constraint()
        return begun(request, self._target, constraint), constraint

    def _open(self, sequence: Sequence, session: ForkedSession, constraint: Constraint | None) -> _Text:
        """Begin to write a text on a fork."""
        curve = curve_of_fork(self._target.curve, session)
        text = _Text(len(self._sequences), open_run(self._target, sequence, session, curve, constraint), session)
        self._live.append(text)
        self._sequences.append(sequence)
        self._outputs.append(text.outputs)
        return text

    def step(self) -> list[SampleOutput]:
        """Make a step of every text that is being written, and return the tokens; a text that ends is let go.

        Raises:
            EdgedecError: The runtime failed, or a grammar's limits were met.
        """
        if self._target.watch is not None:
            for sentence in self._target.watch.check():
                self._note(sentence)
        prepared = self._drafting.prepared([(text.sequence, text.run.decoder) for text in self._live])
        texts, found, n_done = [*zip(self._live, prepared, strict=True)], list[SampleOutput](), 0
        for items in self.forks.groups([_item(*text) for text in texts]):
            found += self._stepped(texts[n_done : n_done + len(items)], items)
            n_done += len(items)
            if self._is_cancelled:
                break
        for text in [*self._live]:
            if text.sequence.finish_reason is not None:
                found += self._end(text)
        return found

    def _stepped(self, texts: _Steps, items: list[ForwardItem]) -> list[SampleOutput]:
        """Evaluate the prepared steps of texts in one forward, and return the tokens; its results are free then."""
        begun_s = perf_counter()
        texts, forwards = self._evaluated(texts, items)
        seconds = perf_counter() - begun_s
        found: list[SampleOutput] = []
        for (text, its), forward in zip(texts, forwards, strict=False):
            n_before = len(text.sequence.token_ids)
            take(text.sequence, text.run.decoder, its, forward, seconds)
            if not text.sequence.stats.first_token_s:
                text.sequence.stats.first_token_s = perf_counter() - self._started
            found += self._noted(text, text.run.outputs(n_before))
        return found

    def _evaluated(self, texts: _Steps, items: list[ForwardItem]) -> tuple[_Steps, list[Forward]]:
        """Return the steps with the results of their common forward; without drafts where there is no room for those.

        Where the system has no memory for a token of each, these texts end; where the forward is cancelled, all end.
        """
        try:
            try:
                return texts, self.forks.forward(items)
            except (ContextFullError, MemoryCapError):
                if not any(its.draft.tokens for _, its in texts):
                    raise
            texts = [(text, its.without_draft()) for text, its in texts]
            return texts, self.forks.forward([_item(*text) for text in texts])
        except CancelledError:
            self._is_cancelled = True
            for text in self._live:
                text.sequence.finish_reason = text.sequence.finish_reason or "cancelled"
        except (ContextFullError, MemoryCapError) as error:
            if not any(text.sequence.n_generated for text, _ in texts):
                raise
            for text, _ in texts:
                text.run.end_full(f"the text ends because memory is full: {error}")
        return texts, []

    def _noted(self, text: _Text, outputs: Iterator[TokenOutput]) -> list[SampleOutput]:
        found = list(outputs)
        text.outputs += found
        return [SampleOutput(text.number, output) for output in found]

    def _note(self, sentence: str) -> None:
        for text in self._live:
            text.sequence.stats.add_reason(sentence)

    def fork(self, number: int) -> int:
        """Go on from where a text is now with one more text, which gets the next seed; return its number.

        Raises:
            RequestError: The text isn't being written, or there are too many.
        """
        source = self._text(number)
        session = self.forks.fork(source.session)
        try:
            request = self._request.text(len(self._sequences))
            sequence, constraint = self._begun(request)
            n_prompt, old = len(request.prompt_ids), source.sequence
            sequence.token_ids, sequence.n_cached = [*old.token_ids], old.n_cached
            sequence.logprob_sum = old.logprob_sum
            sequence.stats.n_reused_tokens = n_prompt
            text = self._open(sequence, session, constraint)
        except BaseException:
            session.close()
            raise
        text.run.decoder.ending.begin(old.token_ids[n_prompt:], n_prompt)
        text.outputs += source.outputs
        return text.number

    def require_room(self, number: int, n: int) -> None:
        """Raise MemoryCapError unless the plan has room for `n` forks of a text beside all others, to the ends of all.

        Raises RequestError where the text isn't being written.
        """
        most, texts = self.forks.most_tokens, [*self._live, *[self._text(number)] * n]
        spans = [(text.session, text.sequence.n_cached, self._end_of_text) for text in texts]
        if most is not None and (n_tokens := self.forks.n_tokens_after(spans)) > most:
            raise MemoryCapError(
                f"{n} more texts beside {len(self._live)} take room for {n_tokens} tokens behind the prompt, and the "
                f"memory plan has room for {most}; drop texts first, ask for shorter ones ({argument('max_tokens')}), "
                f"or load the model for more texts ({argument('n_texts')})"
            )

    def drop(self, number: int) -> None:
        """Stop writing a text; what it has stays, with the finish_reason "cancelled" (RequestError: it has ended)."""
        self._end(self._text(number))

    def choose(self, number: int) -> None:
        """Stop writing all texts but one (RequestError: that one isn't being written)."""
        chosen = self._text(number)
        for text in [*self._live]:
            if text is not chosen:
                self._end(text)

    def end_all(self) -> list[SampleOutput]:
        """Stop writing all texts, with the finish_reason "cancelled"; return the text that was held back."""
        return [output for text in [*self._live] for output in self._end(text)]

    def settle(self, numbers: Collection[int]) -> None:
        """Let go of texts that have ended and stay as they are."""
        for text in [text for text in self._held if text.number in numbers]:
            self._let_go(text)

    def end_at(self, n_drawn: int) -> list[SampleOutput]:
        """End all texts behind the first `n_drawn` tokens drawn for each; return the text that was held back there."""
        found: list[SampleOutput] = []
        for text in sorted((*self._live, *self._held), key=lambda text: text.number):
            text.run.shorten(text.outputs, n_drawn)
            found += self._noted(text, text.run.held_output())
            self._let_go(text)
        return found

    def _end(self, text: _Text) -> list[SampleOutput]:
        is_whole = text.sequence.finish_reason not in (None, "cancelled")
        text.sequence.finish_reason = text.sequence.finish_reason or "cancelled"
        held = self._noted(text, text.run.held_output())
        if is_whole and self.holds_ended:
            self._live.remove(text)
            self._held.append(text)
        else:
            self._let_go(text)
        return held

    def _text(self, number: int) -> _Text:
        found = [text for text in self._live if text.number == number]
        if not found:
            raise RequestError(f"text {number!r:.40} isn't being written; these are: {[*self.live]}")
        return found[0]

    def _let_go(self, text: _Text) -> None:
        """Close what a text is written with; its statistics are complete then."""
        (self._live if text in self._live else self._held).remove(text)
        try:
            text.run.close()
        finally:
            text.session.close()
            text.sequence.stats.total_s = perf_counter() - self._started
            text.sequence.stats.n_generated_tokens = text.sequence.n_generated

    def close(self) -> None:
        """Let all texts go; calling it again does nothing."""
        try:
            self._drafting.close()
            while texts := [*self._live, *self._held]:
                self._let_go(texts[0])
        finally:
            self.forks.close()


def _item(text: _Text, its: Prepared) -> ForwardItem:
    """Return the rows of a text's prepared step."""
    return item_of(text.sequence, text.run.decoder, its)
