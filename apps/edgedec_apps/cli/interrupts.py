"""Ctrl-C and SIGTERM: they cancel the work, which keeps its results so far and leaves no half-written file."""

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
from edgedec_apps.cli.chat.echo import restore_echo
from edgedec_apps.cli.exit_codes import of_signal
from edgedec_apps.cli.shown.terminal import say

T = TypeVar("T")

_PATIENCE_S = 1.0
_SAME_S = 0.2
_SHOW_CURSOR = b"\x1b[?25h"
_INTERRUPT = (signal.SIGINT,)
_TERMINATE = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP", "SIGBREAK") if hasattr(signal, name))


class TerminatedError(CancelledError):
    """SIGTERM or a similar signal ended the process, and the work was cancelled."""

    def __init__(self, number: int) -> None:
        super().__init__("terminated")
        self.exit_code = of_signal(number)


@contextmanager
def terminable() -> Iterator[None]:
    """Let SIGTERM end the block with an exception, so that files are cleaned up and the terminal is restored."""

    def on_signal(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(of_signal(number))

    with _handling(_TERMINATE, on_signal):
        yield


def interruptible(work: Callable[[CancelToken], T]) -> T:
    """Return the result of `work`, which runs in a thread, so that Ctrl-C has an effect while native code runs.

    The first Ctrl-C cancels the token, and `work` returns what it has; a second one ends the process at once.

    Raises:
        TerminatedError: SIGTERM or a similar signal cancelled the work.
        BaseException: As `work`.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work(cancel))
        except BaseException as error:  # raised again in the main thread
            errors.append(error)

    cancel = CancelToken()
    thread = threading.Thread(target=run, name="edgedec-work", daemon=True)
    watch = _Watch(cancel)
    with _handling(_INTERRUPT + _TERMINATE, watch.on_signal):
        thread.start()
        while thread.is_alive():
            thread.join(0.2)  # a time limit, as Windows needs it to see Ctrl-C
            watch.insist()
    if errors and not isinstance(errors[0], CancelledError):
        raise errors[0]
    if watch.terminated is not None:
        raise TerminatedError(watch.terminated)
    if errors:
        raise errors[0]
    return results[0]


class _Watch:
    """The signals since the work began."""

    def __init__(self, cancel: CancelToken) -> None:
        self._cancel = cancel
        self._since: float | None = None
        self._said = False
        self.terminated: int | None = None

    def on_signal(self, number: int, _frame: FrameType | None) -> None:
        """Cancel the work at the first signal, and end the process at the second.

        A signal right after the first is the same one: timeout(1) sends it to the process, and then to its group.
        """
        if self._since is not None and time.monotonic() - self._since < _SAME_S:
            return
        if self._since is not None:
            if sys.stderr.isatty():
                os.write(2, _SHOW_CURSOR)  # a progress bar may have hidden it
            restore_echo()
            os._exit(of_signal(number))
        self._since = time.monotonic()
        self.terminated = number if number in _TERMINATE else None
        self._cancel.cancel()

    def insist(self) -> None:
        """Cancel again while the work goes on; where it takes long to stop, say so."""
        if self._since is None:
            return
        self._cancel.cancel()  # a cancel between two forwards of a prefill has no effect on either
        if not self._said and time.monotonic() - self._since > _PATIENCE_S:
            self._said = True
            say("edgedec: stopping; Ctrl-C again ends at once")


@contextmanager
def _handling(numbers: tuple[int, ...], handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Handle signals inside the block; signals that are ignored (nohup, background jobs) stay ignored."""
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
