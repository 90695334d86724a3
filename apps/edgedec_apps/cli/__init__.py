"""The command line: `edgedec`.

Generated text goes to standard output, everything else to standard error; the exit codes are in edgedec.errors and
exit_codes.py. Slow modules are imported where Ctrl-C is caught. So is everything of `edgedec`, as the files of another
distribution may have replaced it (edgedec_apps.clash).
"""

import gc
import os
import re
import sys
from contextlib import suppress
from typing import Any

from edgedec_apps.cli import exit_codes


def main() -> None:
    """Run the command line, and exit. Every error is one line of text, unless EDGEDEC_DEBUG is set."""
    gc.set_threshold(50_000)  # of objects in cycles: imports make none, and looking for some took a tenth of a start
    code = _run()
    gc.freeze()  # nor need the end look for any
    # A Ctrl-C that passed through code made from a text, as dataclasses run it, would end `python -m` by SIGINT after
    # all; Python forgets it when it next runs such code.
    exec("")
    sys.exit(code)


def _run() -> int:
    """Run the command and return its exit code."""
    try:
        from edgedec_apps.cli.shown.terminal import prepare_streams

        prepare_streams()
        from edgedec_apps.cli.app import run_app
        from edgedec_apps.cli.completion import join_words
        from edgedec_apps.cli.interrupts import terminable

        join_words()
        with terminable():
            code = run_app()
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _failed("interrupted", exit_codes.of_signal(2))
    except BrokenPipeError:  # the reader of standard output has closed it
        _abandon_output()
        return 0
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # typer turned it into an exit
            _abandon_output()
            return 0
        return error.code if isinstance(error.code, int) else 0
    except Exception as error:
        if os.environ.get("EDGEDEC_DEBUG"):
            raise
        return _explain(error)
    return code


def _explain(error: Exception) -> int:
    """Print an error as one line, and return its exit code."""
    try:
        from edgedec.errors import EdgedecError, MemoryCapError, StorageError
        from edgedec_apps.cli.wording import in_options
    except ImportError:
        return _internal(error)
    if isinstance(error, EdgedecError):
        return _failed(in_options(error), error.exit_code)
    if hasattr(error, "format_message"):  # usage errors of typer
        return _failed(_usage(error), exit_codes.USAGE)
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else "standard output: "
        return _failed(f"{where}{error.strerror or error}", StorageError.exit_code)
    if isinstance(error, MemoryError):
        return _failed("out of memory; use a shorter context or a smaller model", MemoryCapError.exit_code)
    return _internal(error)


def _usage(error: Any) -> str:
    """Return the message of a usage error of typer; where a word of llama.cpp or ollama was typed, with edgedec's."""
    from edgedec.callers import did_you_mean
    from edgedec_apps.cli.other_words import moved, own_words

    context = error.ctx
    command = context.command_path if context is not None else "edgedec"
    is_group = context is None or hasattr(context.command, "commands")
    words = sys.argv[1:] if is_group else sys.argv[2:]
    flags = [] if is_group else [flag for each in context.command.params for flag in (*each.opts, *each.secondary_opts)]
    advice = (not is_group and moved(words, flags)) or own_words(words, options=flags, commands=is_group)
    what, hint = error.format_message(), f"; {advice}" if advice else ""
    if unknown := re.match("No such command '(.*?)'", what):
        what, hint = unknown[0], hint or did_you_mean(unknown[1], () if context is None else context.command.commands)
    elif hasattr(error, "possibilities"):
        what, hint = error.message, hint or did_you_mean(error.option_name, flags)
    return f"{what.rstrip('.')}{hint} (see {command} --help)"


def _internal(error: Exception) -> int:
    """Print that there is a bug, or that another distribution has damaged the installation."""
    from edgedec_apps.clash import clash

    what = f"{type(error).__name__}: {error}"
    intruder = clash()
    unknown = f"internal error: {what} (EDGEDEC_DEBUG=1 shows where)"
    return _failed(f"{what}; {intruder}" if intruder else unknown, exit_codes.INTERNAL)


def _failed(message: str, code: int) -> int:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):  # else writing it would fail again at exit
        _abandon_output()
    try:
        from edgedec_apps.cli.shown.terminal import say
    except ImportError:
        with suppress(OSError, ValueError):
            print(f"edgedec: {message}", file=sys.stderr)
        return code
    say(f"edgedec: {message}")
    return code


def _abandon_output() -> None:
    from edgedec_apps.cli.shown.terminal import abandon_output

    abandon_output()
