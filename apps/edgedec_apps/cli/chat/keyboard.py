"""The messages that a person types in a chat."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from edgedec_apps.cli.shown.terminal import say

_QUOTES = '"""'


def typed_messages(history: Path | None) -> Iterator[str]:
    """Yield the messages that a person types, until Ctrl-D; three quotation marks enclose one of several lines.

    Args:
        history: The file that keeps what is typed; None for no file.
    """
    ask = _reader(history)
    while True:
        try:
            text = ask(">>> ")
            if text.startswith(_QUOTES):
                text = _more_lines(text.removeprefix(_QUOTES), ask)
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /bye leaves)")
            continue
        if text.strip():
            yield text


def is_screen() -> bool:
    """Return whether standard output is a terminal that understands escape sequences."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") != "dumb"


def _reader(history: Path | None) -> Callable[[str], str]:
    """Return what asks for a line: an editor at a terminal, a plain read elsewhere."""
    if is_screen():
        from edgedec_apps.cli.chat.line_editor import line_editor  # here, as it imports prompt_toolkit

        return line_editor(history)
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  # gives input() editing
    return _plain_line


def _more_lines(first: str, ask: Callable[[str], str]) -> str:
    lines = [first]
    while not lines[-1].endswith(_QUOTES):
        lines.append(ask("... "))
    return "\n".join(lines).removesuffix(_QUOTES).strip("\n")


def _plain_line(prompt: str) -> str:
    """Return a typed line without its end; the prompt goes to standard error where standard output is no terminal."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
