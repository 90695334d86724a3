"""The decode loop: step after step of the texts that are written together, which may be a single one.

Each text is drafted, verified and learned from by itself (step.py); only the forward is common. So a text has the bits
that it would have alone.
"""

from collections.abc import Iterable, Iterator, Sequence
from time import perf_counter

from edgedec.decoding.reading import reread
from edgedec.decoding.step import Prepared, alone, evaluated, prepare, take
from edgedec.decoding.text_run import TextRun
from edgedec.errors import CancelledError, ContextFullError, EdgedecError, MemoryCapError
from edgedec.memory.shedding import Watch
from edgedec.sequence import TokenOutput


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
        """Make a step of every text, and return each text with its new tokens, of which it holds those that are read.

        Raises:
            EdgedecError: The runtime failed, a grammar's limits were met, or there is no room for a first token.
        """
        for sentence in () if self._watch is None else self._watch.check():
            for run in self.live:
                run.text.stats.add_reason(sentence)
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
