"""Run another program to its end; when it is cancelled, end it and all programs that it started."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from edgedec.errors import StorageError
from edgedec.processes import OWN_GROUP, end_group
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
    """Run a program in a process group of its own and return its exit status.

    The program's standard input is a pipe that closes when this process ends for any reason.

    Args:
        command: The program and its arguments.
        log: File that the program's output is appended to.
        what: Name of the work, for the message when it is cancelled.
        environment: The program's environment variables; None passes ours on.
        cancel: Ends the program and what it started.

    Raises:
        CancelledError: `cancel` was cancelled.
        StorageError: The program cannot be started, or the log cannot be written.
    """
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                **OWN_GROUP,
            )
    except OSError as error:
        raise StorageError(
            f"{command[0]}: the program cannot be started ({error.strerror or error}); check that file"
        ) from error
    try:
        while True:
            check_cancelled(cancel, what)
            with suppress(subprocess.TimeoutExpired):
                return process.wait(_POLL_S)
    finally:
        _end(process)


def last_line(log: Path, n_most: int = 240) -> str:
    """Return the last line of a log that is not empty, at most n_most characters of it; "nothing" without one."""
    try:
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "nothing"
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")[:n_most]


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a program that still runs and what it started: by SIGTERM, and after a while by SIGKILL."""
    assert process.stdin is not None, "it was started with a pipe"
    if process.poll() is None:
        end_group(process.pid, at_once=False)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
        end_group(process.pid, at_once=True)  # all of the group that still run
        process.wait()
    with suppress(OSError):
        process.stdin.close()
