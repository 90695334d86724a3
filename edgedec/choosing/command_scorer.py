"""A scorer that is a command: unit tests, a checker, a program in any language.

The command gets one JSON object on its standard input, {"prefix": text, "steps": [text, ...]}, and prints a JSON array
with a score from 0 to 1 for each step. It is an argument list that no shell reads. Only the caller of the API, or of
the command line, names it; a request to the server can't. `edgedec refine` runs the same command on one text at a
time, and reads its standard error, too.
"""

import json
import os
import secrets
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic

from edgedec.errors import OptionError, PluginError, argument
from edgedec.processes import OWN_GROUP, end_group
from edgedec.progress import CancelToken, check_cancelled

SCORER_S = 60.0
"""Seconds that a call of a scorer may take, unless the caller says otherwise."""
_POLL_S = 0.02
_DRAIN_S = 0.5  # most that is waited for what lies in a pipe when the command has ended
_MOST_BYTES = 1 << 20
"""Most bytes that a command may print."""
_ENDS_BYTES = 1 << 15  # of what it says on standard error, kept of the beginning and of the end


class CommandScorer:
    """Implements Scorer by a command, which runs once for each call; it and its children are ended with the call."""

    def __init__(self, command: Sequence[str], *, seconds: float = SCORER_S, cancel: CancelToken | None = None) -> None:
        """Keep the command, each call of which takes `seconds` at most and ends with `cancel`; nothing runs yet.

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
        ran = self.run(prefix, steps)
        if ran.failure:
            raise PluginError(f"the scorer {self._command[0]!r:.80} {ran.failure}")
        return _scores(ran.printed)

    def run(self, prefix: str, steps: Sequence[str]) -> "Ran":
        """Run the command on texts, and return how that went.

        Raises:
            PluginError: The command does not start.
            CancelledError: `cancel` ended it.
        """
        try:
            with (
                tempfile.TemporaryFile() as stdin_file,
                _Kept(_MOST_BYTES + 1) as printed,
                _Kept(_ENDS_BYTES) as said,
            ):
                stdin_file.write(json.dumps({"prefix": prefix, "steps": list(steps)}).encode())
                stdin_file.seek(0)
                process = subprocess.Popen(
                    self._command, stdin=stdin_file, stdout=printed.writes, stderr=said.writes, **OWN_GROUP
                )
                try:
                    failure = self._waited_for(process, printed)
                finally:
                    end_group(process.pid, at_once=True)
                    process.wait()
        except (OSError, ValueError) as error:
            raise PluginError(f"the scorer {self._command[0]!r:.80} does not start: {error}") from error
        return Ran(bytes(printed.first), bytes(said.first + said.last), failure)

    def _waited_for(self, process: "subprocess.Popen[bytes]", printed: "_Kept") -> str:
        """Wait for the end of a process, and return why it failed; empty where it did not."""
        ends = monotonic() + self._seconds
        while True:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_S)
                return "" if status == 0 else f"ended with status {status}; it must end with 0"
            check_cancelled(self._cancel, "the search")
            if len(printed.first) > _MOST_BYTES:
                return (
                    f"printed more than {_MOST_BYTES} bytes and was ended; it must print a JSON array with a number "
                    "from 0 to 1 for each text"
                )
            if monotonic() > ends:
                return (
                    f"took longer than {self._seconds:g} s and was ended; make it faster, or allow more with "
                    f"{argument('scorer_seconds')}"
                )


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended.

    Attributes:
        printed: What it printed on standard output.
        said: The beginning and the end of what it wrote to standard error.
        failure: Why it failed, as the rest of a sentence; empty where it ended with status 0.
    """

    printed: bytes
    said: bytes
    failure: str

    @property
    def is_status(self) -> bool:
        """Whether the command ended by itself, or by a signal, with another status than 0."""
        return self.failure.startswith("ended")

    def scores(self) -> Sequence[float] | None:
        """Return the array that it printed; None where it failed, or printed something else."""
        with suppress(PluginError):
            return None if self.failure else _scores(self.printed)
        return None


class _Kept:
    """A pipe that a thread reads: it keeps the first bytes and the last ones, so that a flood fills nothing.

    What is read ends with the context, even where a process that left the command's group still writes.

    Attributes:
        writes: The pipe's end for writing.
        first: The first bytes, at most `most`.
        last: The last of those that follow, at most `most`.
    """

    def __init__(self, most: int) -> None:
        self.first, self.last = bytearray(), bytearray()
        self._most = most
        self._end = secrets.token_bytes(16)

    def __enter__(self) -> "_Kept":
        reads, self.writes = os.pipe()
        self._thread = threading.Thread(target=self._read, args=(reads,), name="edgedec-scorer", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End what is kept behind what lies in the pipe."""
        with suppress(OSError), open(self.writes, "wb", buffering=0) as pipe:
            pipe.write(self._end)
        self._thread.join(_DRAIN_S)

    def _read(self, reads: int) -> None:
        held = b""  # may be the beginning of the end
        with open(reads, "rb", buffering=0) as pipe:
            while self._end not in held and (data := pipe.read(1 << 16)):
                held += data
                whole = held.partition(self._end)[0] if self._end in held else held[: 1 - len(self._end)]
                room = max(0, self._most - len(self.first))
                self.first += whole[:room]
                self.last = (self.last + whole[room:])[-self._most :]
                held = held[len(whole) :]


def _scores(text: bytes) -> Sequence[float]:
    """Return what a command printed, as long as that is a JSON array; who calls checks its numbers."""
    try:
        scores = json.loads(text) if len(text) <= _MOST_BYTES else None
    except (ValueError, RecursionError):
        scores = None
    if not isinstance(scores, list):
        raise PluginError(
            f"the scorer printed {text[:60]!r}; it must print a JSON array with a number from 0 to 1 for each text"
        )
    return scores
