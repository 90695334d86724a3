"""Progress on standard error: a bar at a terminal, a line every tenth of a download elsewhere."""

import sys
import time
from typing import Any

from edgedec.progress import OnProgress, Progress
from edgedec_apps.cli.terminal import neutral, one_line, say

_PATIENCE_S = 0.5

Key = tuple[str, str]


class ProgressLine:
    """Shows progress inside a `with` block. Work that is over in half a second shows nothing."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._started: dict[Key, float] = {}
        self._tasks: dict[Key, Any] = {}
        self._told: dict[Key, int] = {}

    def __enter__(self) -> OnProgress:
        return self._report

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar away; calling it again does nothing."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
            self._tasks.clear()

    def _report(self, progress: Progress) -> None:
        if self._quiet:
            return
        if sys.stderr.isatty():
            self._draw(progress)
        elif progress.unit == "bytes" and progress.total:  # long enough to be worth lines in a log
            key = (progress.phase, progress.detail)
            tenth = progress.done * 10 // progress.total
            if tenth > self._told.get(key, -1):
                self._told[key] = tenth
                say(f"{progress.phase} {progress.detail}: {tenth * 10} % of {progress.total / 1e6:.0f} MB")

    def _draw(self, progress: Progress) -> None:
        key, now = (progress.phase, progress.detail), time.monotonic()
        started = self._started.setdefault(key, now)
        ended = progress.total is not None and progress.done >= progress.total
        if key in self._tasks:
            self._bar.update(self._tasks[key], completed=progress.done, total=progress.total)
            if ended:
                self._bar.update(self._tasks.pop(key), visible=False)
        elif now - started >= _PATIENCE_S and not ended:
            if self._bar is None:
                self._bar = _bar()
                self._bar.start()
            label = neutral(one_line(f"{progress.phase} {progress.detail}".strip()))
            self._tasks[key] = self._bar.add_task(
                label, completed=progress.done, total=progress.total, unit=progress.unit
            )


def _bar() -> Any:
    """Return a bar of rich's, which takes a while to import."""
    from rich.console import Console
    from rich.progress import BarColumn, ProgressColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar
    from rich.table import Column
    from rich.text import Text

    class Amount(ProgressColumn):
        """How much is done: MB and speed of a download, tokens of a prefill."""

        def render(self, task: Any) -> Text:
            unit = task.fields["unit"]
            if unit == "bytes":
                speed = f" {task.speed / 1e6:5.1f} MB/s" if task.speed else ""
                return Text(f"{task.completed / 1e6:.0f} of {(task.total or 0) / 1e6:.0f} MB{speed}")
            return Text("" if unit == "%" else f"{task.completed:.0f} of {task.total or 0:.0f} {unit}")

    # The label gives way where the terminal is narrow, as a line that wraps could not be drawn over.
    text = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)
    )
    columns = (
        text,
        BarColumn(12),
        TaskProgressColumn(table_column=Column(no_wrap=True)),
        Amount(table_column=Column(no_wrap=True)),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
    )
    return Bar(*columns, console=Console(stderr=True, emoji=False, highlight=False), transient=True, expand=True)
