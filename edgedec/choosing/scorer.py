"""A scorer that is a command: unit tests, a checker, a program in any language.

The command gets one JSON object on its standard input, {"prefix": text, "steps": [text, ...]}, and prints a JSON array
with a score from 0 to 1 for each step. It is an argument list that no shell reads. Only the caller of the API, or of
the command line, names it; a request to the server can't.
"""

import json
import math
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from edgedec.choosing.partial_texts import PartialText, PartialTexts
from edgedec.errors import EdgedecError, OptionError, PluginError, ScorerError, argument
from edgedec.progress import CancelToken, check_cancelled

SCORER_S = 60.0
"""Seconds that a call of a scorer may take, unless the caller says otherwise."""
_POLL_S = 0.02
_MOST_BYTES = 1 << 20
"""Most bytes that a command may print."""


class CommandScorer:
    """Implements Scorer by a command, which runs once for each call; it and its children are ended with the call."""

    def __init__(self, command: Sequence[str], *, seconds: float = SCORER_S, cancel: CancelToken | None = None) -> None:
        """Keep the command; nothing runs yet.

        Args:
            command: The program and its arguments.
            seconds: Most seconds of a call.
            cancel: Ends a call that is running.

        Raises:
            OptionError: The command is no list of strings, or the seconds are not above 0.
        """
        is_list = isinstance(command, Sequence) and not isinstance(command, str | bytes)
        if not is_list or not command or not all(isinstance(part, str) for part in command):
            raise OptionError("scorer", command, "a command must be a list of strings: the program and its arguments")
        if not 0 < seconds < 1e9:
            raise OptionError("scorer_seconds", seconds, "it must be above 0")
        self._command = tuple(command)
        self._seconds = seconds
        self._cancel = cancel

    def __call__(self, prefix: str, steps: Sequence[str], /) -> Sequence[float]:
        """Return what the command prints.

        Raises:
            PluginError: It does not start, fails, takes too long, or prints something else than a JSON array.
            CancelledError: The search was cancelled meanwhile.
        """
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as printed:
            given.write(json.dumps({"prefix": prefix, "steps": list(steps)}).encode())
            given.seek(0)
            try:
                process = subprocess.Popen(
                    self._command, stdin=given, stdout=printed, stderr=subprocess.DEVNULL, start_new_session=True
                )
            except (OSError, ValueError) as error:
                raise PluginError(f"the scorer {self._command[0]!r:.80} does not start: {error}") from error
            try:
                status = self._waited_for(process, printed.fileno())
            finally:
                _end(process)
            printed.seek(0)
            text = printed.read(_MOST_BYTES + 1)
        if status != 0:
            raise PluginError(f"the scorer {self._command[0]!r:.80} ended with status {status}; it must end with 0")
        return _scores(text)

    def _waited_for(self, process: "subprocess.Popen[bytes]", printed: int) -> int:
        """Return a process's exit status when it has ended; `printed` is the file that it prints to."""
        ends = monotonic() + self._seconds
        while True:
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
            check_cancelled(self._cancel, "the search")
            if os.fstat(printed).st_size > _MOST_BYTES:
                raise PluginError(
                    f"the scorer {self._command[0]!r:.80} printed more than {_MOST_BYTES} bytes and was ended; it must "
                    "print a JSON array with a number from 0 to 1 for each text"
                )
            if monotonic() > ends:
                raise PluginError(
                    f"the scorer {self._command[0]!r:.80} took longer than {self._seconds:g} s and was ended; make it "
                    f"faster, or allow more with {argument('scorer_seconds')}"
                )


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and, where the system has process groups, all that it started."""
    with suppress(OSError):
        if hasattr(os, "killpg"):
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    process.wait()


def _scores(text: bytes) -> Sequence[float]:
    """Return what a command printed, as long as that is a JSON array; who calls checks its numbers."""
    try:
        found = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list):
        raise PluginError(
            f"the scorer printed {text[:60]!r}; it must print a JSON array with a number from 0 to 1 for each text"
        )
    return found


class Scorer(Protocol):
    """A caller's scorer."""

    def __call__(self, prefix: str, steps: Sequence[str], /) -> Sequence[float]:
        """Return a score from 0 to 1 for each of `steps`, all of which follow `prefix`."""


class TextScorer(Protocol):
    """A scorer as the searches call it: of the texts themselves, so that it can also look at their branches."""

    def __call__(self, texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        """Return a score from 0 to 1 for each text of `live`."""


@dataclass(frozen=True, slots=True)
class CallerScorer:
    """Implements TextScorer by a caller's function, or by a command.

    A function runs in a thread, so that the search can end although the function hangs. Python can't end a thread: one
    that hangs stays until the process ends. A command (edgedec.choosing.scorer) leaves nothing over.

    Attributes:
        scorer: The function, or the argument list of a command.
        prefix: The prompt as text.
        seconds: Most seconds of a call.
    """

    scorer: Scorer | Sequence[str]
    prefix: str
    seconds: float = SCORER_S

    def __call__(self, texts: PartialTexts, live: Sequence[PartialText], /) -> list[float]:
        """Return the caller's scores; raises what scores_of() raises."""
        return scores_of(self.scorer, self.prefix, [texts.text(text) for text in live], self.seconds, texts.cancel)


def require_scorer(scorer: Scorer | Sequence[str] | None, seconds: float) -> None:
    """Raise OptionError unless `scorer` is a function, an argument list or None, and the seconds are above 0."""
    if not isinstance(seconds, int | float) or not 0 < seconds < 1e9:
        raise OptionError("scorer_seconds", seconds, "it must be above 0")
    if scorer is not None and not callable(scorer):
        CommandScorer(scorer, seconds=seconds)


def scores_of(
    scorer: Scorer | Sequence[str], prefix: str, steps: Sequence[str], seconds: float, cancel: CancelToken | None
) -> list[float]:
    """Return the scores that a caller's function or command gives texts.

    Args:
        scorer: The function, or the argument list of a command.
        prefix: The prompt as text.
        steps: The texts.
        seconds: Most seconds of the call.
        cancel: Ends the call.

    Raises:
        ScorerError: The scorer failed, took too long, or returned something else than scores; it has the texts.
        OptionError: The command is no list of strings, or the seconds are not above 0.
        CancelledError: `cancel` was cancelled meanwhile.
        EdgedecError: The function raised one itself.
    """
    try:
        if callable(scorer):
            found = in_time(lambda: scorer(prefix, steps), seconds, cancel)
        else:
            found = CommandScorer(scorer, seconds=seconds, cancel=cancel)(prefix, steps)
        return checked_scores(found, len(steps))
    except PluginError as error:
        raise ScorerError(error.marked, tuple(steps)) from error


def checked_scores(found: object, n: int) -> list[float]:
    """Return scores as floats (PluginError unless they are n numbers from 0 to 1).

    >>> checked_scores((1, 0.5), 2)
    [1.0, 0.5]
    """
    expected = f"it must return {n} numbers from 0 to 1, one for each text"
    try:
        scores = [float(score) for score in found]  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError) as error:
        raise PluginError(f"the scorer returned {found!r:.100}; {expected}") from error
    if len(scores) != n or not all(0 <= score <= 1 for score in scores):
        raise PluginError(f"the scorer returned {scores!s:.100}; {expected}")
    return scores


def in_time(call: Callable[[], Any], seconds: float, cancel: CancelToken | None) -> Any:
    """Return what a function of others returns, if it does so in time.

    Raises:
        PluginError: It raised an error, or took longer.
        CancelledError: `cancel` was cancelled meanwhile.
        EdgedecError: It raised one itself.
    """
    if not 0 < seconds < math.inf:
        raise OptionError("scorer_seconds", seconds, "it must be above 0")
    found: list[Any] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="edgedec-scorer", daemon=True)
    thread.start()
    left = seconds
    while thread.is_alive() and left > 0:
        thread.join(min(_POLL_S, left))
        left -= _POLL_S
        check_cancelled(cancel, "the search")
    if failed:
        if isinstance(failed[0], EdgedecError):
            raise failed[0]
        raise PluginError(f"the scorer raised {type(failed[0]).__name__}: {failed[0]!s:.200}") from failed[0]
    if not found:
        raise PluginError(
            f"the scorer took longer than {seconds:g} s for a call; make it faster, or allow more with "
            f"{argument('scorer_seconds')}"
        )
    return found[0]
