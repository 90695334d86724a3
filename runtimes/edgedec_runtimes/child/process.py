"""The parent's side of the child: it starts the process, calls it, and notices its end."""

import itertools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from queue import Empty, SimpleQueue
from time import monotonic
from typing import IO, Any

from edgedec.errors import RuntimeLostError, RuntimeUnavailableError
from edgedec.progress import OnProgress
from edgedec_runtimes.child.messages import LOAD, Answer, Ask, Cancel, Channel, GoOn, Report

_PROGRAM = "edgedec_runtimes.child"
_MODEL = "edgedec_runtimes.child.host:Calls"
_POLL_S = 0.5
PATIENCE_S = 10.0  # for what ends a call or the process
_CANCEL_S = 30.0  # for a call that was cancelled: on a slow device a forward looks up only now and then
_SOON_S = 0.05
_TAIL_BYTES = 2000
_Box = SimpleQueue[Answer | Report | None]


class Child:
    """A process that hosts one model, or something else that may end its process.

    Attributes:
        ending: How the process ended, once it has; None while it runs.
        n_cached: For each session's number, how many tokens its KV cache held after the latest call.
    """

    def __init__(self, calls: str = _MODEL, **environment: str) -> None:
        """Start the process, which answers the calls of a class ("module:class"; edgedec_runtimes.child.host.Hosted).

        Further variables are added to its environment.

        Raises:
            RuntimeUnavailableError: No process can be started, or the application is frozen.
        """
        if getattr(sys, "frozen", False):
            raise RuntimeUnavailableError("a frozen application has no Python to run the model's process with")
        self.ending: str | None = None
        self.n_cached: dict[int, int] = {}
        self._numbers = itertools.count(1)
        self._boxes: dict[int, _Box] = {}
        self._cancelled_at: dict[int, float] = {}  # by session, or LOAD: when its call was first cancelled
        self._reason: str | None = None
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  # closed when the process has ended
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", _PROGRAM, calls],
                env=child_environment() | {"GGML_NO_BACKTRACE": "1"} | environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._stderr,
            )
        except OSError as error:
            raise RuntimeUnavailableError(f"the model's process can't be started: {error}") from error
        self.pid = self._process.pid
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._channel = Channel(self._process.stdout, self._process.stdin)
        self._receiver = threading.Thread(target=self._receive, daemon=True, name="edgedec-child")
        self._receiver.start()

    def ask(
        self,
        method: str,
        *arguments: Any,
        on_progress: OnProgress | None = None,
        sessions: tuple[int, ...] = (),
        patience_s: float = math.inf,
    ) -> Answer:
        """Call a method in the child and return its answer.

        Ctrl-C, or another exception in the waiting thread, cancels the forward of `sessions` and waits up to 10 s for
        its end; cancel() from another thread lets it have 30 s, and no call has more than `patience_s` seconds. A
        child that does not come to it is ended: its library, or a machine that it waits for, may hang.

        Raises:
            EdgedecError: What the method raised.
            RuntimeLostError: The process has ended.
        """
        number, box = next(self._numbers), _Box()
        self._boxes[number] = box
        cancelled_by = (LOAD,) if method == "open" else sessions
        for session in cancelled_by:
            self._cancelled_at.pop(session, None)
        try:
            if self.ending is not None:
                raise self._lost()
            self._send(Ask(number, method, arguments, on_progress is not None, sessions))
            return self._answer(box, on_progress, cancelled_by, monotonic() + patience_s)
        finally:
            del self._boxes[number]

    def _answer(self, box: _Box, on_progress: OnProgress | None, sessions: tuple[int, ...], deadline: float) -> Answer:
        raised: BaseException | None = None
        while True:
            try:
                message = self._next(box, deadline, sessions)
                if isinstance(message, Answer):
                    break
                stop = True
                try:
                    if on_progress is not None and raised is None:
                        on_progress(message.progress)
                        stop = False
                finally:
                    self._send(GoOn(stop))
            except RuntimeLostError as lost:
                raise (raised or lost) from None
            except BaseException as error:  # Ctrl-C while waiting, or the callback's
                if raised is None:
                    raised, deadline = error, min(deadline, monotonic() + PATIENCE_S)
                    for session in sessions:
                        self.cancel(session)
        if message.n_cached:
            self.n_cached = message.n_cached
        if raised is not None:
            raise raised
        if message.failure is not None:
            raise message.failure
        return message

    def _next(self, box: _Box, deadline: float, sessions: tuple[int, ...]) -> Answer | Report:
        """Return the next message of a call (RuntimeLostError where none can come any more)."""
        while True:
            try:
                message = box.get(timeout=_POLL_S)
            except Empty:
                cancelled_at = min(self._cancelled_at.get(session, math.inf) for session in (*sessions, -1))
                if monotonic() > min(deadline, cancelled_at + _CANCEL_S):
                    self._kill("it did not stop when it was told to")
                continue
            if message is None:
                raise self._lost()
            return message

    def cancel(self, session: int) -> None:
        """Cancel the forward of a session, or the loading, from any thread; without one, nothing happens."""
        self._cancelled_at.setdefault(session, monotonic())
        try:
            with suppress(RuntimeLostError):
                self._send(Cancel(session), _SOON_S)
        except TimeoutError:  # another thread is sending, and nobody reads: perhaps for ever
            threading.Thread(target=self._cancel_or_kill, args=(session,), daemon=True).start()

    def _cancel_or_kill(self, session: int) -> None:
        try:
            with suppress(RuntimeLostError):
                self._send(Cancel(session), _CANCEL_S)
        except TimeoutError:
            self._kill("it took no more calls")

    def end(self) -> None:
        """Close the pipe, which ends the process; one that has not ended after 10 s is killed."""
        try:
            self._channel.hang_up(PATIENCE_S)
        except TimeoutError:
            self._process.kill()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._receiver.join(PATIENCE_S)

    def kill(self) -> None:
        """End the process at once."""
        self._kill("it was ended")

    def _send(self, message: Ask | GoOn | Cancel, patience_s: float = -1) -> None:
        """Send a message (TimeoutError where another thread sends for longer than `patience_s`)."""
        try:
            self._channel.send(message, patience_s)
        except TimeoutError:
            raise
        except (OSError, ValueError):  # a broken pipe, or one that was closed
            self._receiver.join(PATIENCE_S)
            raise self._lost() from None

    def _kill(self, reason: str) -> None:
        self._reason = reason
        self._process.kill()

    def _receive(self) -> None:
        while (message := self._channel.receive()) is not None:
            if isinstance(message, Answer | Report) and (box := self._boxes.get(message.number)) is not None:
                box.put(message)
        code = self._process.wait()
        self._channel.close()
        ending = _ending(code, self._last_words())
        self.ending = self._reason or ending
        for box in list(self._boxes.values()):
            box.put(None)

    def _last_words(self) -> str:
        """Return the last line that the process wrote on standard error, and close the file."""
        with self._stderr as file:
            n_bytes = file.seek(0, os.SEEK_END)
            file.seek(max(0, n_bytes - _TAIL_BYTES))
            lines = [line.strip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
        place, colon, words = (lines[-1] if lines else "").partition(": ")
        return f"{place.rpartition('/')[2]}{colon}{words}"  # a failed check begins with the path of its source

    def _lost(self) -> RuntimeLostError:
        return RuntimeLostError(self.ending or self._reason or "it has ended")


def _ending(code: int, words: str) -> str:
    """Say how a process ended, with its last words."""
    try:
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
    except ValueError:
        how = f"was ended by signal {-code}"
    return f"it {how}: {words}" if words else f"it {how}"


def child_environment() -> dict[str, str]:
    """Return this process's environment, with its import path: a child imports what this process can import."""
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
