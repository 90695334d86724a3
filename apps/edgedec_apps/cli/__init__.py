"""The command line: `edgedec`.

Generated text goes to standard output, all else to standard error; exit codes are those of edgedec.errors and of
exit_codes.py. What takes time to import is imported where Ctrl-C is caught, and so is all of `edgedec`, which another
distribution's files may have replaced (edgedec_apps.clash).
"""

import os
import sys
from contextlib import suppress

from edgedec_apps.cli import exit_codes


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
        return _failed("interrupted", exit_codes.of_signal(2))
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
    try:
        from edgedec.errors import EdgedecError, MemoryCapError, StorageError
        from edgedec_apps.cli.wording import in_options
    except ImportError:
        return _internal(error)
    if isinstance(error, EdgedecError):
        return _failed(in_options(error), error.exit_code)
    if hasattr(error, "format_message"):  # typer's usage errors
        context = getattr(error, "ctx", None)
        command = context.command_path if context is not None else "edgedec"
        return _failed(f"{error.format_message().rstrip('.')} (see {command} --help)", exit_codes.USAGE)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else "standard output: "
        return _failed(f"{where}{error.strerror or error}", StorageError.exit_code)
    if isinstance(error, MemoryError):
        return _failed("out of memory; try a shorter context or a smaller model", MemoryCapError.exit_code)
    return _internal(error)


def _internal(error: Exception) -> int:
    """Say that there is a bug, or that the installation is damaged by another distribution, where there is one."""
    from edgedec_apps.clash import clash

    what = f"{type(error).__name__}: {error}"
    told = clash()
    if told:
        return _failed(f"{what}; {told}", exit_codes.INTERNAL)
    return _failed(f"internal error: {what} (EDGEDEC_DEBUG=1 shows where)", exit_codes.INTERNAL)


def _failed(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # what can't be written can't be written at exit either
        _abandon_output()
    try:
        from edgedec_apps.cli.terminal import say
    except ImportError:
        with suppress(OSError, ValueError):
            print(f"edgedec: {message}", file=sys.stderr)
        return code
    say(f"edgedec: {message}")
    return code


def _abandon_output() -> None:
    from edgedec_apps.cli.terminal import abandon_output

    abandon_output()
