"""Progress on standard error: a bar at a terminal, a line elsewhere. Work without reports is shown with its time."""

import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

from edgedec.progress import OnProgress, Progress, stage
from edgedec_apps.cli.shown.terminal import neutral, one_line, say
from edgedec_apps.reading_pace import ReadingPace

_PATIENCE_S = 0.5  # before work is shown at a terminal
_LINE_PATIENCE_S = 1.0  # before work is shown elsewhere that has no name for all of it
_LINE_EVERY_S = 300.0  # between two lines elsewhere; programs that run others end those that are silent for longer
_PACE_AFTER_S = 10.0  # before a line says how fast tokens come
_TICK_S = 0.25
_PROMPT = "prefill"

Key = tuple[str, str]


@dataclass(slots=True)
class _Work:
    """Work that is going on: its latest report, when it began, and what was shown of it."""

    latest: Progress
    started: float
    n_before: int = 0  # what was done before it began: a run that goes on where another one stopped
    pace: ReadingPace | None = None  # of a prompt
    task: Any = None

    @property
    def label(self) -> str:
        """The name of the work, on one line."""
        return one_line(f"{self.latest.phase} {self.latest.detail}".strip())


class ProgressLine:
    """Shows progress inside a `with` block. At a terminal, work that is over in half a second shows nothing.

    Elsewhere a command says one line when its first work begins, and one more every five minutes.

    Attributes:
        quiet: Whether nothing is shown at all.
        said_at: When the process said its latest line elsewhere than at a terminal.
    """

    said_at: ClassVar[float] = -math.inf

    def __init__(self, what: str = "", *, quiet: bool = False) -> None:
        """`what` names all of the work in a first line elsewhere; else the first piece of work is named."""
        self.quiet = quiet
        self._what = what
        self._bar: Any = None
        self._works: dict[Key, _Work] = {}
        self._lock = threading.Lock()  # between reports and the thread of _watch
        self._ended: threading.Event | None = None

    def __enter__(self) -> OnProgress:
        return self.report

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Remove the bar; a second call does nothing."""
        with self._lock:
            if self._ended is not None:
                self._ended.set()
                self._ended = None
            self._remove_bar()
            self._works.clear()

    def _remove_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def report(self, progress: Progress) -> None:
        """Take a report, and show it where it is time to; any thread may call this."""
        if self.quiet:
            return
        key, now = (progress.phase, progress.detail), time.monotonic()
        with self._lock:
            work = self._works.setdefault(key, _Work(progress, now, progress.done))
            work.latest = progress
            if progress.phase == _PROMPT and progress.unit:
                work.pace = work.pace or ReadingPace()
                work.pace.add(progress.done, now)
            self._show(work, now)
            if _is_over(progress):
                del self._works[key]
                if work.task is not None:
                    self._bar.update(work.task, visible=False)
                if not self._works:
                    self._remove_bar()  # another ProgressLine may show one
            if self._ended is None and self._works:
                self._ended = threading.Event()
                threading.Thread(target=self._watch, args=(self._ended,), name="edgedec-progress", daemon=True).start()

    def _watch(self, ended: threading.Event) -> None:
        """Show work without new reports, until the end."""
        while not ended.wait(_TICK_S):
            with self._lock:
                for work in () if ended.is_set() else self._works.values():
                    self._show(work, time.monotonic())

    def _show(self, work: _Work, now: float) -> None:
        if sys.stderr.isatty():
            self._draw(work, now)
        elif (
            now - ProgressLine.said_at >= _LINE_EVERY_S
            and (self._what or now - work.started >= _LINE_PATIENCE_S)
            and not _is_over(work.latest)
        ):
            self._say(work, now)

    def _draw(self, work: _Work, now: float) -> None:
        latest = work.latest
        if work.task is not None:
            pace = _foreseen(work)
            self._bar.update(work.task, completed=latest.done, total=latest.total, unit=latest.unit, pace=pace)
        elif now - work.started >= _PATIENCE_S and not _is_over(latest):
            if self._bar is None:
                self._bar = _bar()
                self._bar.start()
            label = neutral(work.label)
            work.task = self._bar.add_task(label, completed=latest.done, total=latest.total, unit=latest.unit, pace="")

    def _say(self, work: _Work, now: float) -> None:
        """Print a line: what is begun, or how far it is."""
        latest, seconds = work.latest, now - work.started
        is_first, ProgressLine.said_at = ProgressLine.said_at == -math.inf, now
        if is_first and (self._what or latest.unit != "bytes"):
            say(one_line(self._what) or work.label)
        else:
            say(f"{work.label}: {_amount(latest) or f'{seconds:.0f} s so far'}{_pace(work, seconds)}")


@contextmanager
def shown(what: str, *, quiet: bool = False) -> Iterator[None]:
    """Show that the block is at work, where it takes long; nothing is shown with `quiet`."""
    with ProgressLine(quiet=quiet) as on_progress, stage(on_progress, what):
        yield


@contextmanager
def shown_at_a_terminal(what: str) -> Iterator[None]:
    """Show at a terminal that the block is at work; elsewhere nothing is shown."""
    with shown(what, quiet=not sys.stderr.isatty()):
        yield


def _is_over(progress: Progress) -> bool:
    return progress.total is not None and progress.done >= progress.total


def _amount(progress: Progress) -> str:
    """Return the amount of work that is done, with its unit.

    >>> _amount(Progress("measuring", 3, 20, "runs")), _amount(Progress("searching", 3, None, "sets"))
    ('3 of 20 runs', '3 sets')
    >>> _amount(Progress("load", 40, 100, "%")), _amount(Progress("load", 0, None, ""))
    ('40 %', '')
    >>> _amount(Progress("download", 30_200_000, 98_000_000, "bytes"))
    '30 of 98 MB'
    """
    if not progress.unit:
        return ""
    if progress.unit == "bytes":
        return f"{progress.done / 1e6:.0f} of {(progress.total or 0) / 1e6:.0f} MB"
    of = "" if progress.total is None or progress.unit == "%" else f" of {progress.total}"
    return f"{progress.done}{of} {progress.unit}"


def _pace(work: _Work, seconds: float) -> str:
    """Return how long the rest will take, and how many tokens a second come; "" for short work and other units.

    >>> _pace(_Work(Progress("training", 2500, 4000, "tokens"), 0.0, 500), 20.0)
    ' (100 tokens/s, 15 s left)'
    >>> _pace(_Work(Progress("training", 2500, 400_000, "tokens"), 0.0, 500), 20.0)
    ' (100 tokens/s, 66 min left)'
    >>> _pace(_Work(Progress("measuring", 10, 60, "runs"), 0.0), 60.0)
    ' (5 min left)'
    """
    latest = work.latest
    if text := _foreseen(work):
        return text
    rate = (latest.done - work.n_before) / max(seconds, 1e-9)
    if latest.unit not in ("tokens", "runs") or latest.total is None or seconds < _PACE_AFTER_S or rate <= 0:
        return ""
    left = _duration((latest.total - latest.done) / rate)
    return f" ({rate:.0f} tokens/s, {left} left)" if latest.unit == "tokens" else f" ({left} left)"


def _foreseen(work: _Work) -> str:
    """Return how fast a prompt is read and how long its rest will take, or what other work foresees; else "".

    >>> _foreseen(_Work(Progress("measuring", 3, 60, "runs", left_s=57.4), 0.0))
    ' (at most 57 s left)'
    """
    latest, pace = work.latest, work.pace
    if latest.left_s is not None:
        return f" (at most {_duration(latest.left_s)} left)"
    left_s = None if pace is None else pace.left_s(latest.total or 0)  # later tokens of a prompt take longer
    return "" if pace is None or left_s is None else f" ({pace.per_s or 0:.0f} tokens/s, {_duration(left_s)} left)"


def _duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.0f} s"


def _bar() -> Any:
    """Return a progress bar of rich, which is imported only here, as that takes time."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
    from rich.text import Text

    class Amount(ProgressColumn):
        """The amount of work: MB and speed of a download, tokens of a prefill, seconds of uncountable work."""

        def render(self, task: Any) -> Text:
            unit, total = task.fields["unit"], None if task.total is None else round(task.total)
            if unit == "bytes":
                speed = f" {task.speed / 1e6:5.1f} MB/s" if task.speed else ""
                return Text(_amount(Progress("", round(task.completed), total, unit)) + speed)
            if unit == "%":
                return Text("")
            seconds, pace = f"{task.elapsed or 0:.0f} s", task.fields["pace"]
            speed = f" {task.speed:.0f}/s" if unit == "tokens" and task.speed and task.elapsed > _PACE_AFTER_S else ""
            return Text((_amount(Progress("", round(task.completed), total, unit)) or seconds) + (pace or speed))

    class Left(TimeRemainingColumn):
        """The time that is left, unless the amount of work says it."""

        def render(self, task: Any) -> Text:
            return Text("") if task.fields["pace"] else super().render(task)

    # In a narrow terminal the label is shortened, as a line that wraps could not be overwritten.
    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    columns = (
        text,
        BarColumn(12),
        TaskProgressColumn(table_column=Column(no_wrap=True)),
        Amount(table_column=Column(no_wrap=True)),
        Left(compact=True, table_column=Column(no_wrap=True)),
    )
    console = Console(stderr=True, emoji=False, highlight=False)
    at_terminal = sys.stdout.isatty()  # else rich would write above the bar what belongs into a file
    return Bar(*columns, console=console, transient=True, expand=True, redirect_stdout=at_terminal)
