"""Where a prompt comes from: the argument, a file, or standard input."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from edgedec.errors import RequestError
from edgedec.memory_plan import parse_size
from edgedec_apps import texts
from edgedec_apps.cli.shown.progress import shown
from edgedec_apps.texts import decoded, read_text

_STANDARD_INPUT = "standard input"


def find_prompt(prompt: str | None, file: Path | None, memory: str | None = None, *, quiet: bool = False) -> str | None:
    """Return the prompt; None for a chat, at a terminal without a prompt.

    The prompt is the argument, the content of `file`, or that of standard input where it is no terminal. Content and
    argument together are one prompt: the content, an empty line, the argument. The content comes first, so that another
    question on the same content finds it in the prompt cache. Content loses a byte order mark at the start and one line
    end at the end; where it is blank, the argument is the prompt.

    Args:
        prompt: The argument.
        file: A file, or - for standard input. With an argument, the file of EDGEDEC_FILE is not read.
        memory: The most memory of the process. At most a 64th of it is read, as encoding a prompt takes several copies
            of up to four bytes a character.
        quiet: Whether it is not said that standard input is awaited.

    Raises:
        RequestError: A text is not UTF-8 or too long.
        StorageError: The file can't be read.
    """
    given = argument_text(prompt, "the prompt")
    if given is not None and file is not None and is_from_environment("FILE", file):
        file = None
    if file is None and sys.stdin.isatty():
        return given
    most_bytes = _most_bytes(None if memory is None else parse_size(memory))
    if file is not None and str(file) != "-":
        content = read_text(file, most_bytes)
    else:
        with shown("reading standard input", quiet=quiet or sys.stdin.isatty()):
            content = decoded(sys.stdin.buffer.read(most_bytes + 1), _STANDARD_INPUT, most_bytes)
    content = content.removesuffix("\n").removesuffix("\r")
    if given is None:
        return content
    return f"{content}\n\n{given}" if content.strip() else given


def system_text(system: str | None, file: Path | None) -> str | None:
    """Return the system message: that of --system, or the content of --system-file without the line end at its end.

    Of two, one of which comes from the environment, the other one counts.

    Raises:
        RequestError: Both options are given, or the text is not UTF-8 or too long.
        StorageError: The file can't be read.
    """
    if system is not None and file is not None:
        if is_from_environment("SYSTEM_FILE", file):
            file = None
        elif not is_from_environment("SYSTEM", system):
            raise RequestError("--system and --system-file exclude each other; give one of them")
    if file is None:
        return argument_text(system, "--system")
    return read_text(file).removesuffix("\n").removesuffix("\r")


def is_from_environment(name: str, value: object) -> bool:
    """Return whether the variable EDGEDEC_`name` has the value of an option, which may have come from there."""
    return os.environ.get(f"EDGEDEC_{name}") == str(value)


def piped_lines(cap_bytes: int | None = None) -> Iterator[str]:
    """Yield the lines of standard input that are not blank; `cap_bytes` is the most memory of the process."""
    most_bytes = _most_bytes(cap_bytes)
    lines = iter(lambda: sys.stdin.buffer.readline(most_bytes + 1), b"")
    for number, line in enumerate(lines, start=1):
        if text := decoded(line, f"{_STANDARD_INPUT}, line {number}", most_bytes).strip():
            yield text


def _most_bytes(cap_bytes: int | None) -> int:
    """Return the most bytes of a prompt's text, of which encoding makes several copies."""
    return texts.MOST_BYTES if cap_bytes is None else min(texts.MOST_BYTES, cap_bytes // 64)


def argument_text(text: str | None, name: str) -> str | None:
    """Return a text of the command line, decoded again where the locale failed (RequestError where it is not UTF-8)."""
    if text is None or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return decoded(os.fsencode(text), name)
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not UTF-8: it has a lone surrogate") from error
