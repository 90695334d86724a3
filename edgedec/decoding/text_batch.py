"""Several texts of one prompt that are written together, token by token: each on a fork of the session that read it.

In each step, all of them have their rows in one forward, and the models that draft for them are called together
(JointDrafting).
"""

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from time import perf_counter

from edgedec.constraint import Constraint, OpenConstraint
from edgedec.decoding.generate import TextLoop, TextRun, begun, generation_of, open_run
from edgedec.decoding.reading import read_prompt, reuse_prefix
from edgedec.decoding.session_pool import SessionSlot
from edgedec.decoding.step import Decoder, Prepared, prepare
from edgedec.decoding.text_room import text_end, tokens_behind
from edgedec.errors import CapabilityError, EdgedecError, MemoryCapError, RequestError, argument
from edgedec.model import Forward, Session
from edgedec.progress import OnProgress
from edgedec.scheduler.drafter_set import begin_prompt
from edgedec.scheduler.shared_cost_curve import curve_of_fork
from edgedec.sequence import Generation, Request, SampleOutput, TextState, TokenOutput
from edgedec.sessions.forks import SessionForks, are_together, require_forks
from edgedec.sessions.joined_work import JointCalls
from edgedec.stats import DecodeStats


class TextBatch(TextLoop):
    """Texts of one prompt that are written together. One thread at a time uses a batch.

    Args:
        slot: The slot whose session reads the prompt.
        request: What is generated; text k gets the seed `request.seed + k`.
        open_constraint: Opens the grammar of each text.
        started: When the request came, in seconds of perf_counter.

    Attributes:
        forks: The sessions of the texts that are being written.
        outputs: The tokens of each text so far, by its number.
        holds_ended: Whether texts that have ended are kept until settle() or end_at(), which may shorten them.
    """

    holds_ended = False

    def __init__(self, slot: SessionSlot, request: Request, open_constraint: OpenConstraint, started: float) -> None:
        super().__init__(slot.watch, started)
        n_prompt = len(request.prompt_ids)
        self.forks = SessionForks(most_tokens=tokens_behind(slot, n_prompt - 1), most_rows=slot.text_rows)
        self._drafting = JointDrafting(self.forks)
        self._slot = slot
        self._request = request
        self._open_constraint = open_constraint
        self._end_of_text = text_end(slot, n_prompt, request.sampling.max_tokens)
        self._held: list[TextRun] = []
        self._texts: list[TextState] = []
        self.outputs: list[list[TokenOutput]] = []

    @property
    def unsettled(self) -> tuple[int, ...]:
        """The numbers of the texts that are being written, and of those that are held."""
        return tuple(sorted(run.number for run in (*self.live, *self._held)))

    @property
    def generations(self) -> tuple[Generation, ...]:
        """What was generated of each text so far, by its number."""
        return tuple(map(generation_of, self._texts, self.outputs))

    def n_drawn(self, number: int) -> int:
        """Return how many tokens were drawn for a text; the one before which it ended is among them."""
        return self._texts[number].n_drawn

    def stats(self, number: int) -> DecodeStats:
        """Return the statistics of a text, which grow while it is written."""
        return self._texts[number].stats

    def read_prompt(self, n: int, on_progress: OnProgress | None) -> None:
        """Read the prompt but for its last token, which each text evaluates, and open `n` texts.

        Raises:
            CapabilityError: The session can't be forked, or a row depends on what else is in its forward.
            CancelledError, EdgedecError: The forward was cancelled, or the runtime failed.
        """
        slot, request = self._slot, self._request
        require_forks(slot.session.model)
        if not are_together(slot.session):
            raise CapabilityError("several texts on such sessions are written one after another")
        prompt = TextState(request, list(request.prompt_ids))
        reuse_prefix(slot, prompt)
        n_reused, n_read = prompt.n_cached, len(request.prompt_ids) - 1
        if slot.drafting is not None and request.draft:
            begin_prompt(slot.drafting, slot.session, greedy=request.sampling.greedy)
        if n_reused < n_read:
            with slot.session.generating(n_read):
                read_prompt(slot, prompt, n_read, on_progress)
        for k in range(n):
            text, constraint = self._begun(request.text(k))
            text.n_cached, text.stats.n_reused_tokens = n_read, n_read if k else n_reused
            self._open(text, slot.session, constraint)

    def _begun(self, request: Request) -> tuple[TextState, Constraint | None]:
        constraint = self._open_constraint()
        return begun(request, self._slot, constraint), constraint

    def _open(self, text: TextState, source: Session, constraint: Constraint | None) -> TextRun:
        """Begin to write a text on a fork of a session; where that fails, neither fork nor grammar stays open."""
        with ExitStack() as undo:
            if constraint is not None:
                undo.callback(constraint.close)
            session = self.forks.fork(source, text.stats)
            undo.callback(session.close)
            run = open_run(self._slot, text, session, curve_of_fork(self._slot.curve), constraint)
            undo.pop_all()
        run.number = len(self._texts)
        self.live.append(run)
        self._texts.append(text)
        self.outputs.append([])
        return run

    def step(self) -> list[SampleOutput]:
        """Make a step of every text that is being written, and return the tokens; a text that ends is let go.

        Raises:
            EdgedecError: The runtime failed, or a grammar's limits were met.
        """
        ended: list[SampleOutput] = []
        for run, outputs in self.stepped():
            ended += self._noted(run, outputs)
        for run in [*self.live]:
            if run.text.finish_reason is not None:
                ended += self._ended(run)
        return ended

    def _prepared(self) -> Iterator[list[Prepared]]:
        steps = self._drafting.prepared([(run.text, run.decoder) for run in self.live])
        n_done = 0
        for items in self.forks.groups([its.item() for its in steps]):
            yield steps[n_done : n_done + len(items)]
            n_done += len(items)

    def _evaluate(self, steps: list[Prepared]) -> list[Forward]:
        return self.forks.forward([its.item() for its in steps])

    def _why_full(self, error: EdgedecError) -> str:
        return f"the text ends because memory is full: {error}"

    def _noted(self, run: TextRun, outputs: Iterator[TokenOutput]) -> list[SampleOutput]:
        noted = list(outputs)
        self.outputs[run.number] += noted
        return [SampleOutput(run.number, output) for output in noted]

    def fork(self, number: int) -> int:
        """Go on from where a text is now with one more text, which gets the next seed; return its number.

        Raises:
            RequestError: The text isn't being written, or there are too many.
        """
        source = self._run(number)
        text, constraint = self._begun(self._request.text(len(self._texts)))
        n_prompt, old = len(text.request.prompt_ids), source.text
        text.token_ids, text.n_cached, text.logprob_sum = [*old.token_ids], old.n_cached, old.logprob_sum
        text.stats.n_reused_tokens = n_prompt
        run = self._open(text, source.decoder.session, constraint)
        run.decoder.ending.begin(old.token_ids[n_prompt:], n_prompt)
        self.outputs[run.number] += self.outputs[number]
        return run.number

    def require_room(self, number: int, n: int) -> None:
        """Raise MemoryCapError unless the plan has room for `n` forks of a text beside all others, to the ends of all.

        Raises RequestError where the text isn't being written.
        """
        most, runs = self.forks.most_tokens, [*self.live, *[self._run(number)] * n]
        spans = [(run.decoder.session, run.text.n_cached, self._end_of_text) for run in runs]
        if most is not None and (n_tokens := self.forks.n_tokens_after(spans)) > most:
            raise MemoryCapError(
                f"{n} more texts beside {len(self.live)} take room for {n_tokens} tokens behind the prompt, and the "
                f"memory plan has room for {most}; drop texts first, ask for shorter ones ({argument('max_tokens')}), "
                f"or load the model for more texts ({argument('n_texts')})"
            )

    def drop(self, number: int) -> None:
        """Stop writing a text; what it has stays, with the finish_reason "cancelled" (RequestError: it has ended)."""
        self._ended(self._run(number))

    def choose(self, number: int) -> None:
        """Stop writing all texts but one (RequestError: that one isn't being written)."""
        chosen = self._run(number)
        for run in [*self.live]:
            if run is not chosen:
                self._ended(run)

    def end_all(self) -> list[SampleOutput]:
        """Stop writing all texts, with the finish_reason "cancelled"; return the text that was held back."""
        return [output for run in [*self.live] for output in self._ended(run)]

    def settle(self, numbers: Collection[int]) -> None:
        """Let go of texts that have ended and stay as they are."""
        for run in [run for run in self._held if run.number in numbers]:
            self._let_go(run)

    def end_at(self, n_drawn: int) -> list[SampleOutput]:
        """End all texts behind the first `n_drawn` tokens drawn for each; return the text that was held back there."""
        outputs: list[SampleOutput] = []
        for run in sorted((*self.live, *self._held), key=lambda run: run.number):
            run.shorten(self.outputs[run.number], n_drawn)
            outputs += self._noted(run, run.held_output())
            self._let_go(run)
        return outputs

    def _ended(self, run: TextRun) -> list[SampleOutput]:
        """Stop writing a text, and return the text that was held back."""
        is_whole = run.text.finish_reason not in (None, "cancelled")
        run.text.finish_reason = run.text.finish_reason or "cancelled"
        held = self._noted(run, run.held_output())
        if is_whole and self.holds_ended:
            self.live.remove(run)
            self._held.append(run)
        else:
            self._let_go(run)
        return held

    def _run(self, number: int) -> TextRun:
        for run in self.live:
            if run.number == number:
                return run
        live = [run.number for run in self.live]
        raise RequestError(f"text {number!r:.40} isn't being written; these are: {live}")

    def _let_go(self, run: TextRun) -> None:
        """Close what a text is written with; its statistics are complete then."""
        (self.live if run in self.live else self._held).remove(run)
        try:
            run.close()
        finally:
            run.decoder.session.close()
            run.text.stats.total_s = perf_counter() - self._started

    def close(self) -> None:
        """Let all texts go; calling it again does nothing."""
        try:
            self._drafting.close()
            while runs := [*self.live, *self._held]:
                self._let_go(runs[0])
        finally:
            self.forks.close()


MOST_THREADS = 32
"""Most texts that are drafted for at a time."""


class JointDrafting:
    """Proposes the drafts of a step, for texts on forks of one session. One thread at a time uses it.

    A drafter calls its model in the middle of its work, so each text has a thread of its own while the drafters of
    several texts are about to call models: when all threads wait for such a call, the calls are answered together.
    Threads cost time, so the other steps have none.
    """

    def __init__(self, forks: SessionForks) -> None:
        self._forks = forks
        self._threads: ThreadPoolExecutor | None = None

    def prepared(self, texts: Sequence[tuple[TextState, Decoder]]) -> list[Prepared]:
        """Return what the next forward of each text evaluates (raises what prepare() raises)."""
        policies = [decoder.policy for _, decoder in texts if decoder.policy is not None]
        if sum([policy.will_call for policy in policies]) < 2:
            return [prepare(*text) for text in texts]
        ready: list[Prepared] = []
        for begin in range(0, len(texts), MOST_THREADS):
            ready += self._in_threads(texts[begin : begin + MOST_THREADS])
        return ready

    def _in_threads(self, texts: Sequence[tuple[TextState, Decoder]]) -> list[Prepared]:
        """Prepare texts in a thread each; where the system has no more threads, the others follow in this one."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(MOST_THREADS, "edgedec-draft")
        joint = self._forks.joint = JointCalls(len(texts))

        def prepared(text: TextState, decoder: Decoder) -> Prepared:
            try:
                return prepare(text, decoder)
            finally:
                joint.leave()

        futures: list[Future[Prepared]] = []
        try:
            for text in texts:
                futures.append(self._threads.submit(prepared, *text))
        except RuntimeError:
            for _ in range(len(futures), len(texts)):
                joint.leave()
        try:
            results = [future.result() for future in futures]
        finally:
            self._forks.joint = None
        return results + [prepare(*text) for text in texts[len(results) :]]

    def close(self) -> None:
        """Wait for the threads and end them; calling close() again does nothing."""
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None
