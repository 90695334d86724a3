"""The progress of long work, and a way to stop it.

Progress is a callback that gets a value; cancellation is a flag that long work looks at between two pieces. Neither
prints anything, and neither installs a signal handler.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from edgedec.errors import CancelledError

_PATIENCE_S = 0.1  # progress through items is not reported before
_EVERY = 512  # items between two looks at the clock

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Progress:
    """One report of a long piece of work.

    Attributes:
        phase: The kind of work, for a person ("download", "verify", "load", "measuring", "prefill").
        done: Units finished.
        total: Units in all, or None where that is not known. The last report of a phase has done == total.
        unit: What is counted: "bytes", "tokens" or "%"; empty where nothing can be counted.
        detail: What is worked on, such as a file name; may be empty.
        left_s: Most seconds that the rest takes, where the work itself foresees them.
    """

    phase: str
    done: int
    total: int | None
    unit: str
    detail: str = ""
    left_s: float | None = None


OnProgress = Callable[[Progress], None]


def report_progress(
    on_progress: OnProgress | None, phase: str, done: int, total: int | None, unit: str, detail: str = ""
) -> None:
    """Call `on_progress` with a Progress of these values; None stands for a caller who wants no reports."""
    if on_progress is not None:
        on_progress(Progress(phase, done, total, unit, detail))


@contextmanager
def stage(on_progress: OnProgress | None, phase: str, detail: str = "") -> Iterator[None]:
    """Report the beginning and the end of the block, whose work can't be counted."""
    report_progress(on_progress, phase, 0, None, "", detail)
    try:
        yield
    finally:
        report_progress(on_progress, phase, 1, 1, "", detail)


class CancelToken:
    """A flag that one thread sets and that long work in another thread looks at.

    Attributes:
        cancelled: Whether cancel() was called.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant, as a signal handler may cancel in the thread that holds the lock
        self.cancelled = False
        self._callbacks: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Ask the work to stop at the next opportunity, from any thread, any number of times."""
        with self._lock:  # so that no block of calling() ends before its callback returns
            self.cancelled = True
            for callback in list(self._callbacks):
                callback()

    def check(self, what: str) -> None:
        """Raise CancelledError if cancel() was called; `what` names the work in the message."""
        if self.cancelled:
            raise CancelledError(f"{what}: cancelled")

    @contextmanager
    def calling(self, callback: Callable[[], object]) -> Iterator[None]:
        """Call `callback` if cancel() is called inside the block; it wakes work that does not look at the flag."""
        with self._lock:
            self._callbacks.append(callback)
        try:
            yield
        finally:
            with self._lock:
                self._callbacks.remove(callback)


def check_cancelled(cancel: CancelToken | None, what: str) -> None:
    """Raise CancelledError when `cancel` was cancelled; None stands for work that nobody can cancel."""
    if cancel is not None:
        cancel.check(what)


def reported(items: Sequence[T], what: str, on_progress: OnProgress | None, cancel: CancelToken | None) -> Iterator[T]:
    """Yield the items, and report the progress of a load where they take over a tenth of a second.

    Args:
        items: What is worked on.
        what: What the report and the error call the items.
        on_progress: Takes the reports, or None.
        cancel: Stops the work, or None.

    Raises:
        CancelledError: The token was cancelled.
    """
    started, is_reported = monotonic(), False
    for i, item in enumerate(items):
        if i % _EVERY == 0:
            check_cancelled(cancel, f"loading {what}")
            if monotonic() - started > _PATIENCE_S:
                is_reported = True
                report_progress(on_progress, "load", 100 * i // len(items), 100, "%", what)
        yield item
    if is_reported:
        report_progress(on_progress, "load", 100, 100, "%", what)


@contextmanager
def shown_progress(on_progress: OnProgress | None, what: str) -> Iterator[OnProgress | None]:
    """Yield the function that load() reports to: `on_progress`, or in a notebook a bar where that is None."""
    shell = sys.modules["IPython"].get_ipython() if on_progress is None and "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is None:  # of a notebook; a terminal has none
        yield on_progress
        return
    from html import escape  # takes milliseconds of a start elsewhere

    place, shown = sys.modules["IPython"].display.display({"text/plain": ""}, raw=True, display_id=True), ""

    def show(text: str, bar: str = "") -> None:
        nonlocal shown
        if text != shown:
            place.update({"text/plain": text, "text/html": f"{bar}{escape(text)}"}, raw=True)
        shown = text

    def report(progress: Progress) -> None:
        text = " ".join(filter(None, (progress.phase, progress.detail)))
        if progress.total and progress.unit:
            share = progress.done / progress.total
            show(f"{text}: {share:.0%}", f'<progress max="1" value="{share:.2f}"></progress> ')
        else:
            show(text)

    yield report
    show(f"loaded {what}")
