"""Where a prompt comes from: the argument, a file, or standard input."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from edgedec.errors import RequestError
from edgedec.memory_plan import parse_size
from edgedec_apps import texts
from edgedec_apps.texts import decoded, read_text

_STANDARD_INPUT = "standard input"


def find_prompt(prompt: str | None, file: Path | None, memory: str | None = None) -> str | None:
    """Return the prompt; None for a chat, at a terminal without a prompt.

    A file or a pipe loses a byte order mark at the start and one line end at the end. `memory` is the most memory of
    the process: at most a 64th of it is read, as encoding a prompt takes several copies of up to four bytes a
    character.

    Raises:
        RequestError: Both an argument and a file are given, or the text is not UTF-8 or too long.
        StorageError: The file can't be read.
    """
    if prompt is not None:
        if file is not None and os.environ.get("EDGEDEC_FILE") != str(file):  # an argument overrides it
            raise RequestError("give the prompt as an argument or with --file, not both")
        return argument_text(prompt, "the prompt")
    most_bytes = _most_bytes(None if memory is None else parse_size(memory))
    if file is not None and str(file) != "-":
        return _without_line_end(read_text(file, most_bytes))
    if file is None and sys.stdin.isatty():
        return None
    return _without_line_end(decoded(sys.stdin.buffer.read(most_bytes + 1), _STANDARD_INPUT, most_bytes))


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


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
