"""The command line: `edgedec`.

Generated text goes to standard output, all else to standard error; exit codes are those of edgedec.errors. What takes
time to import is imported where Ctrl-C is caught.
"""

import os
import sys

from edgedec.errors import CancelledError, EdgedecError, MemoryCapError, StorageError

INTERNAL_ERROR = 70
USAGE_ERROR = 2


def main() -> None:
    """Run the command line; never lets a traceback out, unless EDGEDEC_DEBUG is set."""
    sys.exit(_run())


def _run() -> int:
    """Run and return the exit code."""
    try:
        from edgedec_apps.cli.terminal import prepare_streams

        prepare_streams()
        from edgedec_apps.cli.app import run_app
        from edgedec_apps.cli.interrupts import terminable

        with terminable():
            code = run_app()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _failed("interrupted", CancelledError.exit_code)
    except BrokenPipeError:  # the reader has had enough
        _abandon_output()
        return 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer saw it first
            _abandon_output()
            return 0
        return error.code if isinstance(error.code, int) else 0
    except Exception as error:
        if os.environ.get("EDGEDEC_DEBUG"):
            raise
        return _explained(error)
    return code


def _explained(error: Exception) -> int:
    """Say what went wrong in one line, and return its exit code."""
    if isinstance(error, EdgedecError):
        from edgedec_apps.cli.wording import in_options

        return _failed(in_options(str(error)), error.exit_code)
    if hasattr(error, "format_message"):  # typer's usage errors
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "edgedec"
        return _failed(f"{error.format_message().rstrip('.')} (see {command} --help)", USAGE_ERROR)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else "standard output: "
        return _failed(f"{where}{error.strerror or error}", StorageError.exit_code)
    if isinstance(error, MemoryError):
        return _failed("out of memory; try a shorter context or a smaller model", MemoryCapError.exit_code)
    return _failed(f"internal error: {type(error).__name__}: {error} (EDGEDEC_DEBUG=1 shows where)", INTERNAL_ERROR)


def _failed(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # what can't be written can't be written at exit either
        _abandon_output()
    from edgedec_apps.cli.terminal import say

    say(f"edgedec: {message}")
    return code


def _abandon_output() -> None:
    from edgedec_apps.cli.terminal import abandon_output

    abandon_output()
