"""Reads documents: texts in UTF-8, and PDFs, which a process of its own reads."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from edgedec.errors import CancelledError, RequestError, StorageError
from edgedec.memory_plan import format_bytes
from edgedec.progress import CancelToken
from edgedec_apps.documents.pdf_text import PAGE_BREAK
from edgedec_apps.texts import MOST_BYTES, decoded
from edgedec_runtimes.child.process import child_environment

MOST_PDF_BYTES = 64_000_000
"""The most bytes of a PDF."""
LEAST_READER_BYTES, READER_BYTES = 48_000_000, 256_000_000
"""The least and the most bytes of memory of the process that reads a PDF."""
_PATIENCE_S = 300.0  # for a PDF, where a person waits for it, and may end it
_MOST_CHARACTERS = 8_000_000  # of a PDF: some thousand pages
_MODULE = "edgedec_apps.documents.pdf_text"
_HEAD_BYTES = 1024  # in which a PDF says that it is one
_PDF_PART = 8  # the part of the free memory for a PDF's bytes


@dataclass(frozen=True, slots=True)
class Document:
    """A document that was read.

    Attributes:
        name: Its name, without a folder.
        text: Its text, with PAGE_BREAK between the pages of a PDF.
        is_paged: Whether it is a PDF.
        is_cut: Whether the end of the text was left out, as it is too long.
    """

    name: str
    text: str
    is_paged: bool = False
    is_cut: bool = False

    @property
    def whole(self) -> str:
        """The text as it goes into a prompt, where that holds all of it."""
        return "\n\n".join(page for page in self.text.split(PAGE_BREAK) if page) if self.is_paged else self.text


def read_document(
    path: Path, most_bytes: int | None = None, free_bytes: int | None = None, cancel: CancelToken | None = None
) -> Document:
    """Return the document of a file.

    Args:
        path: The file, or a pipe that has a name.
        most_bytes: Most bytes of its text.
        free_bytes: Memory that reading may take, with the process that reads a PDF; None for no limit.
        cancel: Ends the reading of a PDF.

    Raises:
        RequestError: The file is too long, a PDF that has no text or can't be read, or neither of both kinds.
        StorageError: The file can't be read.
        CancelledError: `cancel` was cancelled.
    """
    if path.is_dir():
        raise StorageError(f"{path} is a directory; name its files")
    try:
        with path.open("rb") as file:
            document = document_from(file, str(path), most_bytes, free_bytes, cancel)
    except (OSError, ValueError) as error:
        raise StorageError(f"{path} can't be read: {getattr(error, 'strerror', None) or error}") from error
    if "\0" in document.text:
        raise RequestError(f"{path} is no text: it holds zero bytes")
    return document


def document_from(
    file: BinaryIO,
    name: str,
    most_bytes: int | None = None,
    free_bytes: int | None = None,
    cancel: CancelToken | None = None,
) -> Document:
    """Return the document that an open file or a pipe holds (raises what read_document raises)."""
    data = file.read(_HEAD_BYTES)
    most = most_pdf_bytes(free_bytes) if is_pdf(data) else most_bytes or MOST_BYTES
    data += file.read(max(0, most + 1 - len(data)))
    base = Path(name).name
    if not is_pdf(data):
        return Document(base, decoded(data, name, most_bytes))
    if why := missing_reader():
        raise RequestError(f"{name} is a PDF; {why}")
    if len(data) > most:
        raise RequestError(f"{name} has more than {most} bytes; give a smaller PDF, or allow more memory")
    n_bytes = READER_BYTES if free_bytes is None else min(READER_BYTES, free_bytes // 2)
    if n_bytes < LEAST_READER_BYTES:
        least = format_bytes(2 * LEAST_READER_BYTES)
        raise RequestError(f"{name}: reading a PDF takes {least} of memory, and fewer are free; allow more (--memory)")
    reply = read_pdf(data, Limits(n_bytes, _PATIENCE_S, _MOST_CHARACTERS), cancel or CancelToken())
    if cancel is not None and cancel.cancelled:
        raise CancelledError("interrupted")
    if "error" in reply:
        raise RequestError(f"{name} can't be read: {reply['error']}")
    return Document(base, str(reply["text"]), is_paged=True, is_cut=bool(reply["cut"]))


def is_pdf(head: bytes | bytearray) -> bool:
    """Return whether the beginning of a file says that it is a PDF."""
    return head[:_HEAD_BYTES].lstrip().startswith(b"%PDF-")


def most_pdf_bytes(free_bytes: int | None) -> int:
    """Return the most bytes of a PDF, within the memory that is free."""
    return MOST_PDF_BYTES if free_bytes is None else min(MOST_PDF_BYTES, free_bytes // _PDF_PART)


def missing_reader() -> str | None:
    """Return why no PDF can be read here; None where one can."""
    return "what is packed into one program can't read PDFs" if getattr(sys, "frozen", False) else None


@dataclass(frozen=True, slots=True)
class Limits:
    """What the reading of a PDF may take: bytes of memory, seconds, and characters, behind which the text is cut."""

    n_bytes: int
    patience_s: float
    n_characters: int


def read_pdf(data: bytes, limits: Limits, cancel: CancelToken) -> dict[str, Any]:
    """Return what the process that reads PDFs says of one; an "error" where it ends without a word."""
    process = subprocess.Popen(
        command(limits),
        env=child_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    with process, cancel.calling(process.kill):
        if cancel.cancelled:
            process.kill()
        try:
            out, _ = process.communicate(data, timeout=limits.patience_s)
        except subprocess.TimeoutExpired:
            process.kill()
            return {"error": f"it took longer than {limits.patience_s:g} s to read"}
        except BaseException:
            process.kill()
            raise
    try:
        reply: dict[str, Any] = json.loads(out)
    except ValueError:
        return {"error": f"it ended the process that reads it (exit status {process.returncode})"}
    return reply


def command(limits: Limits) -> list[str]:
    """Return the command of the process that reads a PDF; the system ends it after three times its seconds."""
    seconds = 3 * max(1, round(limits.patience_s))
    return [sys.executable, "-P", "-m", _MODULE, *map(str, (limits.n_bytes, seconds, limits.n_characters))]
