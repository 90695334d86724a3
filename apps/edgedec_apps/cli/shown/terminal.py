"""Output for a person: text goes to standard output, everything else to standard error.

Text from models, files and clients is never read as markup. Its control characters are made visible, so that nobody can
write escape sequences to a terminal or lines into a log; pipes and files get generated text unchanged.
"""

import json
import os
import shutil
import stat
import sys
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

_KEPT = {"\n", "\t"}
# A C0 control character becomes its picture (U+2400 and on). A C1 control, a direction override and half of a surrogate
# pair become U+FFFD.
_VISIBLE = {code: 0x2400 + code for code in range(0x20) if chr(code) not in _KEPT}
_VISIBLE |= {0x7F: 0x2421}
_OTHERS = (range(0x80, 0xA0), range(0x202A, 0x202F), range(0x2066, 0x206A), range(0xD800, 0xE000))
_VISIBLE |= {code: 0xFFFD for codes in _OTHERS for code in codes}
_LEAST_COLUMNS = 40  # of the last column of a table, where another can be left out for it
_ONE_LINE = _VISIBLE | {0x0A: 0x240A, 0x2028: 0xFFFD, 0x2029: 0xFFFD}


def neutral(text: str) -> str:
    """Return the text with its control characters made visible; line ends and tabs stay.

    >>> neutral("a\\x1b[2Jb\\n")
    'a␛[2Jb\\n'
    """
    return text.translate(_VISIBLE)


def one_line(text: object) -> str:
    """Return a value as neutral text without line ends, so that it can't look like several lines of a report.

    >>> one_line("a\\nb\\x1b")
    'a␊b␛'
    """
    return str(text).translate(_ONE_LINE)


def prepare_streams() -> None:
    """Let the standard streams take any character: UTF-8 into pipes, replacement characters on consoles without UTF-8.

    A stream that was closed before the start is opened on the null device; else the first file that the process opens
    would get its descriptor.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - open until the end
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            piped = not stream.isatty() and "PYTHONIOENCODING" not in os.environ
            stream.reconfigure(encoding="utf-8" if piped else stream.encoding, errors="replace")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # for typed lines; pipes are read as bytes


def abandon_output() -> None:
    """Discard the buffered standard output and everything written to it later, since it can't be written."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def say(message: str) -> None:
    """Print a line on standard error; do nothing where standard error is closed."""
    with suppress(OSError, ValueError):
        print(neutral(message), file=sys.stderr, flush=True)


def writes_a_file() -> bool:
    """Return whether standard output is a file: what reads a pipe, as tee does, may write to the same terminal."""
    with suppress(OSError, ValueError):
        mode = os.fstat(sys.stdout.fileno()).st_mode
        return not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode) or sys.stdout.isatty())
    return False


def write_text(text: str) -> None:
    """Write generated text to standard output, as it is unless that is a terminal, and flush it."""
    sys.stdout.write(neutral(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def write_line(line: str) -> None:
    """Write a line of a report to standard output."""
    sys.stdout.write(neutral(line) + "\n")


def write_json(document: Any) -> None:
    """Write a document to standard output as one line of JSON in ASCII, which no console's encoding can damage."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


def write_facts(rows: list[tuple[str, str]], *, indent: str = "") -> None:
    """Write names and values in two columns to standard output; at a terminal a long value wraps inside its column."""
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        write_paragraph(one_line(value), f"{indent}{name:{width}}  ", " " * (len(indent) + width + 2))


def write_table(rows: Sequence[tuple[str, ...]], *, dropped: int | None = None) -> None:
    """Write rows as columns.

    At a terminal the last column wraps, below the others where it has no room beside them. Where it is narrow, the
    column `dropped` is left out.
    """
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else 0
    if dropped is not None and columns and columns - sum(widths) - 2 * len(widths) < _LEAST_COLUMNS:
        rows, widths = [row[:dropped] + row[dropped + 1 :] for row in rows], widths[:dropped] + widths[dropped + 1 :]
    hanging = " " * (sum(widths) + 2 * len(widths))
    if columns and columns - len(hanging) < _LEAST_COLUMNS // 2:
        hanging = "    "
    for row in rows:
        beside = "".join(f"{cell:{width}}  " for cell, width in zip(row[:-1], widths, strict=True))
        if columns and len(beside) > len(hanging):
            write_line(beside.rstrip())
            beside = hanging
            if not row[-1]:
                continue
        write_paragraph(row[-1], beside, hanging)


def write_paragraph(text: str, beside: str = "", hanging: str = "") -> None:
    """Write a text behind `beside`; at a terminal it wraps, and later lines begin with `hanging`."""
    columns = max(shutil.get_terminal_size().columns, 40) if sys.stdout.isatty() else 0
    if not len(hanging) + 20 <= columns < len(beside + text):
        write_line(f"{beside}{text}".rstrip())
        return
    for line in textwrap.wrap(text, columns, initial_indent=beside, subsequent_indent=hanging, break_on_hyphens=False):
        write_line(line)
