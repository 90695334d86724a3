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
    """Return the prompt, or None where a chat is meant.

    Of a file or a pipe, a mark of UTF-8 at the start and one line end at the end don't count. `memory` is what the
    process may hold: a 64th of it is the most that is read, as there are several copies of up to four bytes a
    character while a text becomes a prompt.

    Raises:
        RequestError: Both were given, or it is not UTF-8, or has no end in sight.
        StorageError: The file can't be read.
    """
    if prompt is not None:
        if file is not None and os.environ.get("EDGEDEC_FILE") != str(file):  # the argument wins over the environment
            raise RequestError("give the prompt as an argument or with --file, not both")
        return argument_text(prompt, "the prompt")
    most_bytes = _most_bytes(None if memory is None else parse_size(memory))
    if file is not None and str(file) != "-":
        return _without_line_end(read_text(file, most_bytes))
    if file is None and sys.stdin.isatty():
        return None
    return _without_line_end(decoded(sys.stdin.buffer.read(most_bytes + 1), _STANDARD_INPUT, most_bytes))


def piped_lines(cap_bytes: int | None = None) -> Iterator[str]:
    """Yield the lines of standard input that say something; `cap_bytes` is what the process may hold."""
    most_bytes = _most_bytes(cap_bytes)
    lines = iter(lambda: sys.stdin.buffer.readline(most_bytes + 1), b"")
    for number, line in enumerate(lines, start=1):
        if text := decoded(line, f"{_STANDARD_INPUT}, line {number}", most_bytes).strip():
            yield text


def _most_bytes(cap_bytes: int | None) -> int:
    """Return the most bytes of a text that becomes a prompt, which has several copies of it on its way."""
    return texts.MOST_BYTES if cap_bytes is None else min(texts.MOST_BYTES, cap_bytes // 64)


def argument_text(text: str | None, name: str) -> str | None:
    """Return a text from the command line, decoded again where the locale could not (RequestError unless UTF-8)."""
    if text is None or not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    try:
        return decoded(os.fsencode(text), name)
    except UnicodeEncodeError as error:
        raise RequestError(f"{name} is not UTF-8: it has a lone surrogate") from error


def _without_line_end(text: str) -> str:
    return text.removesuffix("\n").removesuffix("\r")
