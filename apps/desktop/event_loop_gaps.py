"""Measure how long the window's event loop waits while two models load, answer and are freed.

    python event_loop_gaps.py [--offline] [MODEL [MODEL]]

Types and clicks as a person does, in the real window (QT_QPA_PLATFORM=offscreen needs no screen). Prints a line for
each thing done, and JSON at the end.
"""

# mypy: disable-error-code="import-not-found"

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter

from main import MODELS, Pane, Window
from PySide6.QtCore import QEventLoop, Qt, QTimer
from PySide6.QtTest import QTest
from PySide6.QtWidgets import QApplication

PERIOD_MS = 5
QUESTION = "Why is the sky blue?"


class Gaps:
    """Seconds between two turns of the event loop, by phase."""

    def __init__(self) -> None:
        self.by_phase: dict[str, list[float]] = {}
        self._phase = ""
        self._last = perf_counter()
        self._timer = QTimer(interval=PERIOD_MS, timerType=Qt.TimerType.PreciseTimer)
        self._timer.timeout.connect(self._note)
        self._timer.start()

    def _note(self) -> None:
        now = perf_counter()
        if self._phase:
            self.by_phase[self._phase].append(now - self._last)
        self._last = now

    @contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Record the gaps inside the block as those of a phase, and print the line of the phase."""
        self.by_phase[phase] = []
        self._phase = phase
        started = perf_counter()
        yield
        self._phase = ""
        gaps = self.by_phase[phase]
        seconds = perf_counter() - started
        print(f"{phase:32} {seconds:6.1f} s  {len(gaps):5} turns  longest gap {max(gaps) * 1e3:5.1f} ms", flush=True)


def until(is_so: Callable[[], bool]) -> None:
    """Run the event loop until a condition holds."""
    while not is_so():
        QApplication.processEvents(QEventLoop.ProcessEventsFlag.WaitForMoreEvents)


def until_idle(*panes: Pane) -> None:
    """Run the event loop until none of the panes loads or answers."""
    until(lambda: not any(pane.stop_button.isEnabled() for pane in panes))


def for_seconds(seconds: float) -> None:
    """Run the event loop for a while."""
    end = perf_counter() + seconds
    until(lambda: perf_counter() > end)


def ask(pane: Pane) -> None:
    """Type the question and press Return."""
    QTest.keyClicks(pane.prompt, QUESTION)
    QTest.keyClick(pane.prompt, Qt.Key.Key_Return)


def main() -> int:
    """Use the window like a person, and print how long the event loop had to wait."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS[:2])
    parser.add_argument("--offline", action="store_true")
    options = parser.parse_args()
    app = QApplication(sys.argv[:1])
    app.setQuitOnLastWindowClosed(False)
    window = Window(options.models, "", options.offline)
    window.show()
    gaps = Gaps()
    with gaps.during("nothing"):
        for_seconds(2)
    for pane in window.panes:
        with gaps.during(f"load {pane.model.currentText()}"):
            QTest.mouseClick(pane.load_button, Qt.MouseButton.LeftButton)
            until_idle(pane)
        with gaps.during(f"answer {pane.model.currentText()}"):
            ask(pane)
            until_idle(pane)
    with gaps.during("answer both at once, then stop"):
        for pane in window.panes:
            ask(pane)
        for_seconds(5)
        for pane in window.panes:
            QTest.mouseClick(pane.stop_button, Qt.MouseButton.LeftButton)
        until_idle(*window.panes)
    with gaps.during("load again, and close meanwhile"):
        QTest.mouseClick(window.panes[-1].load_button, Qt.MouseButton.LeftButton)
        for_seconds(0.3)
        window.close()
        until(lambda: all(pane.worker_thread.isFinished() for pane in window.panes))
    print(json.dumps({phase: round(max(seconds) * 1e3, 1) for phase, seconds in gaps.by_phase.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
