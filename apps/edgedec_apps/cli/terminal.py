"""What a person sees: text on standard output, all else on standard error, nothing that moves the cursor.

Text from models and files is never markup, and control characters in it are made visible at a terminal, so that no
model can write escape sequences.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from edgedec.progress import CancelToken, OnProgress, Progress

if TYPE_CHECKING:
    from rich.progress import TaskID

    from edgedec.sequence import Generation

T = TypeVar("T")

_KEPT = {"\n", "\t"}
# Controls get their pictures (U+2400...); C1 controls and direction overrides a replacement character.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT}
_VISIBLE |= {0x7F: 0x2421}
_VISIBLE |= dict.fromkeys([*range(0x80, 0xA0), *range(0x202A, 0x202F), *range(0x2066, 0x206A)], 0xFFFD)


def neutral(text: str) -> str:
    """Return the text with control characters made visible, but for line ends and tabs.

    >>> neutral("a\\x1b[2Jb\\n")
    'a␛[2Jb\\n'
    """
    return text.translate(_VISIBLE)


def prepare_streams() -> None:
    """Make the standard streams take any character: UTF-8 into pipes, replacements on consoles that lack it."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            piped = not stream.isatty() and "PYTHONIOENCODING" not in os.environ
            stream.reconfigure(encoding="utf-8" if piped else stream.encoding, errors="replace")


def say(message: str, *, stream: TextIO | None = None) -> None:
    """Print a line for the person, on standard error."""
    target = stream or sys.stderr
    print(neutral(message) if target.isatty() else message, file=target, flush=True)


def write_text(text: str) -> None:
    """Write generated text to standard output at once."""
    sys.stdout.write(neutral(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def summary(generation: "Generation") -> str:
    """Return the one line that follows a reply."""
    stats = generation.stats
    parts = [
        f"first token {stats.first_token_s:.2f} s",
        f"{stats.tokens_per_s:.1f} tokens/s",
        f"{stats.n_generated_tokens} tokens ({generation.finish_reason})",
        f"drafted {stats.n_draft_tokens}, accepted {stats.n_accepted_tokens}",
    ]
    if stats.n_reused_tokens:
        parts.append(f"{stats.n_reused_tokens} of {stats.n_prompt_tokens} prompt tokens reused")
    return " · ".join([*parts, *stats.reasons])


class ProgressLine:
    """Shows progress on standard error: a bar at a terminal, a line every tenth elsewhere. Use as a context."""

    def __init__(self, *, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Any = None
        self._tasks: dict[tuple[str, str], TaskID] = {}
        self._told: dict[tuple[str, str], int] = {}

    def __enter__(self) -> OnProgress:
        return self._report

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

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
        from rich.console import Console
        from rich.markup import escape
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn, TransferSpeedColumn
        from rich.progress import Progress as Bar

        if self._bar is None:
            text = TextColumn("{task.description}", markup=True)
            columns: list[Any] = [text, BarColumn()]
            if progress.unit == "bytes":
                columns += [DownloadColumn(), TransferSpeedColumn()]
            else:
                columns.append(TextColumn("{task.completed:.0f}/{task.total:.0f} {task.fields[unit]}"))
            columns.append(TimeRemainingColumn())
            self._bar = Bar(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
        key = (progress.phase, progress.detail)
        if key not in self._tasks:
            label = escape(neutral(f"{progress.phase} {progress.detail}".strip()))
            self._tasks[key] = self._bar.add_task(label, total=progress.total, unit=progress.unit)
        self._bar.update(self._tasks[key], completed=progress.done, total=progress.total)


def interruptible(work: Callable[[CancelToken], T]) -> T:
    """Run `work` in a thread, so that Ctrl-C is seen while native code runs.

    The first Ctrl-C cancels, and `work` returns what it has; a second one within two seconds ends the process.
    """
    from edgedec.errors import CancelledError

    cancel = CancelToken()
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(cancel))
        except BaseException as error:  # carried over to the main thread
            errors.append(error)

    thread = threading.Thread(target=run, name="edgedec-work", daemon=True)
    thread.start()
    interrupted_at = None
    while thread.is_alive():
        try:
            thread.join(0.2)
        except KeyboardInterrupt:
            if interrupted_at is not None and time.monotonic() - interrupted_at < 2:
                os._exit(CancelledError.exit_code)
            interrupted_at = time.monotonic()
            cancel.cancel()
    if errors:
        raise errors[0]
    return results[0]
