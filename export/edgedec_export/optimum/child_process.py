"""Run another program to its end, or end it with all that it started."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from edgedec.errors import StorageError
from edgedec.progress import CancelToken, check_cancelled

_POLL_S = 0.1
_PATIENCE_S = 5.0


def run_child(
    command: Sequence[str | os.PathLike[str]],
    log: Path,
    *,
    what: str,
    environment: Mapping[str, str] | None = None,
    cancel: CancelToken | None = None,
) -> int:
    """Run a program in a group of its own and return its exit status.

    Its standard input is a pipe that is closed when this process ends, however it ends.

    Args:
        command: The program and its arguments.
        log: File that its output is appended to.
        what: Names the work where it is cancelled.
        environment: Its environment; None for ours.
        cancel: Ends it, and what it started.

    Raises:
        CancelledError: It was cancelled.
        StorageError: The program can't be started, or the log not be written.
    """
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        raise StorageError(f"{command[0]}: can't be started ({error.strerror or error}); check that file") from error
    try:
        while True:
            check_cancelled(cancel, what)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
    finally:
        _end(process)


def last_line(log: Path, n_most: int = 240) -> str:
    """Return the last line of a log that says anything, at most so many characters of it."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")[:n_most]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a program that still runs, and what it started: first kindly."""
    assert process.stdin is not None, "it was started with a pipe"
    if process.poll() is None:
        _send(process, "SIGTERM")
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
        _send(process, "SIGKILL")  # to what is left of the group, with it or without
        process.wait()
    with suppress(OSError):
        process.stdin.close()


def _send(process: "subprocess.Popen[bytes]", number: str) -> None:
    """Send a signal to a program's group; where there are no groups, end it."""
    if sys.platform == "win32":
        process.kill()
        return
    with suppress(ProcessLookupError):
        os.killpg(process.pid, getattr(signal, number))
