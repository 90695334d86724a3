"""The messages that a person types in a chat."""

import sys
from collections.abc import Iterator
from contextlib import suppress

from edgedec_apps.cli.terminal import say

_QUOTES = '"""'


def typed_messages() -> Iterator[str]:
    """Yield the messages that a person types, until Ctrl-D; three quotation marks enclose one of several lines."""
    with suppress(ImportError):  # not on Windows
        import readline  # noqa: F401  # gives input() editing and history
    while True:
        try:
            text = _ask(">>> ")
            if text.startswith(_QUOTES):
                text = _more_lines(text.removeprefix(_QUOTES))
        except EOFError:
            say("")
            return
        except KeyboardInterrupt:
            say("\n(Ctrl-D or /bye leaves)")
            continue
        if text.strip():
            yield text


def _more_lines(first: str) -> str:
    lines = [first]
    while not lines[-1].endswith(_QUOTES):
        lines.append(_ask("... "))
    return "\n".join(lines).removesuffix(_QUOTES).strip("\n")


def _ask(prompt: str) -> str:
    """Return a typed line without its end; the prompt goes to standard error where standard output is no terminal."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.rstrip("\n")
