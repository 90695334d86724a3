"""Ctrl-C and SIGTERM: work is cancelled and what it had so far is kept; nothing is left half-written."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from edgedec.errors import CancelledError
from edgedec.progress import CancelToken
from edgedec_apps.cli.exit_codes import of_signal
from edgedec_apps.cli.terminal import say

T = TypeVar("T")

_PATIENCE_S = 1.0
_SHOW_CURSOR = b"\x1b[?25h"
_INTERRUPT = (signal.SIGINT,)
_TERMINATE = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))


class TerminatedError(CancelledError):
    """The process was asked to end, by SIGTERM or its like, and the work was cancelled."""

    def __init__(self, number: int) -> None:
        super().__init__("terminated")
        self.exit_code = of_signal(number)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block as an exception would, so that files are cleaned up and the terminal is restored."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(of_signal(number))

    with _handling(_TERMINATE, on_signal):
        yield


def interruptible(work: Callable[[CancelToken], T]) -> T:
    """Run `work` in a thread, so that Ctrl-C is seen while native code runs.

    The first Ctrl-C cancels, and `work` returns what it has; a second one ends the process at once.

    Raises:
        TerminatedError: The process was asked to end (SIGTERM); the work was cancelled.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(cancel))
        except BaseException as error:  # carried over to the main thread
            errors.append(error)

    cancel = CancelToken()
    thread = threading.Thread(target=run, name="edgedec-work", daemon=True)
    watch = _Watch(cancel)
    with _handling(_INTERRUPT + _TERMINATE, watch.on_signal):
        thread.start()
        while thread.is_alive():
            thread.join(0.2)  # a limit, so that Windows sees Ctrl-C too
            watch.insist()
    if errors and not isinstance(errors[0], CancelledError):
        raise errors[0]
    if watch.terminated is not None:
        raise TerminatedError(watch.terminated)
    if errors:
        raise errors[0]
    return results[0]


class _Watch:
    """What signals did since the work began."""

    def __init__(self, cancel: CancelToken) -> None:
        self._cancel = cancel
        self._since: float | None = None
        self._told = False
        self.terminated: int | None = None

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Cancel the work; the second time, end the process."""
        if self._since is not None:
            if sys.stderr.isatty():
                os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
            os._exit(of_signal(number))
        self._since = time.monotonic()
        self.terminated = number if number in _TERMINATE else None
        self._cancel.cancel()

    def insist(self) -> None:
        """Cancel again while the work goes on, and say what is going on when it takes its time to stop."""
        if self._since is None:
            return
        self._cancel.cancel()  # what came between two forwards of a prefill stopped neither
        if not self._told and time.monotonic() - self._since > _PATIENCE_S:
            self._told = True
            say("edgedec: stopping; Ctrl-C again ends at once")


@contextmanager
def _handling(numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals inside the block; those that are ignored (nohup, background jobs) stay ignored."""
    old: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in numbers:
            if signal.getsignal(number) is not signal.SIG_IGN:
                old[number] = signal.signal(number, handler)
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)
