"""A scorer that is a command: unit tests, a checker, a program in any language.

The command gets one JSON object on its standard input, {"prefix": text, "steps": [text, ...]}, and prints a JSON array
with a score from 0 to 1 for each step. It is an argument list that no shell reads. Only the caller of the API, or of
the command line, names it; a request to the server can't. The core finds it by the entry point `command_scorer` of
`edgedec.own`.
"""

import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from time import monotonic

from edgedec.choosing.scorer import SCORER_S
from edgedec.errors import OptionError, PluginError, argument
from edgedec.progress import CancelToken, check_cancelled
from edgedec_runtimes.shared.processes import OWN_GROUP, end_group

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
                    self._command, stdin=given, stdout=printed, stderr=subprocess.DEVNULL, **OWN_GROUP
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
    """End a process and all that it started."""
    end_group(process.pid, at_once=True)
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
