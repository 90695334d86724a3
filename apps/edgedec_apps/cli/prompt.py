"""Where a prompt comes from: arguments, files, standard input, or a search in documents."""

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgedec.errors import RequestError
from edgedec.memory_plan import parse_size
from edgedec_apps import texts
from edgedec_apps.cli.shown.progress import shown
from edgedec_apps.cli.shown.terminal import one_line, say
from edgedec_apps.texts import decoded

if TYPE_CHECKING:
    from edgedec_apps.documents.files import Document
    from edgedec_apps.documents.search import Found

_STANDARD_INPUT = "standard input"


def find_documents(files: Sequence[Path], memory: str | None = None, *, quiet: bool = False) -> "list[Document] | None":
    """Return what a prompt is about: the content of files, or that of standard input where it is no terminal.

    None stands for neither. A text loses a byte order mark at the start and one line end at the end.

    Args:
        files: Files, texts or PDFs; - is standard input.
        memory: The most memory of the process. Of a text at most a 64th of it is read, as encoding a prompt takes
            several copies of up to four bytes a character.
        quiet: Whether it is not said what is read.

    Raises:
        RequestError: A text is not UTF-8 or too long, or a PDF can't be read.
        StorageError: A file can't be read.
    """
    if not files and sys.stdin.isatty():
        return None
    from edgedec_apps.documents.files import document_from, read_document  # here, as a plain prompt needs none

    cap_bytes = None if memory is None else parse_size(memory, "memory")
    most_bytes, read = _most_bytes(cap_bytes), list["Document"]()
    for file in files or [Path("-")]:
        if str(file) == "-":
            with shown("reading standard input", quiet=quiet or sys.stdin.isatty()):
                document = document_from(sys.stdin.buffer, _STANDARD_INPUT, most_bytes, cap_bytes)
        else:
            with shown(f"reading {file.name}", quiet=quiet):
                document = read_document(file, most_bytes, cap_bytes)
        if document.is_cut and not quiet:
            say(f"edgedec: {one_line(document.name)} is too long to be read whole; its end is left out")
        read.append(replace(document, text=document.text.removesuffix("\n").removesuffix("\r")))
    return read


def say_found(documents: Sequence["Document"], passages: "Found", n_ctx: int) -> None:
    """Say that documents were searched, and which passages are read."""
    names = one_line(", ".join(document.name for document in documents))
    say(f"edgedec: {passages.line(names, n_ctx)}")


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
