"""Reading documents: texts, and PDFs by a process of its own; what is refused, with a reason."""

import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.texts.pdf_files import pdf_of, swelling

from edgedec.errors import CancelledError, EdgedecError, RequestError
from edgedec.progress import CancelToken
from edgedec_apps.documents import pdf_text
from edgedec_apps.documents.files import Document, read_document

pytestmark = pytest.mark.slow

PAGES = ("The first page.\nIts second (line).", "", "The last page.")


def test_a_long_text_is_cut() -> None:
    """At so many characters, which is said; pages behind that are not read."""
    found = pdf_text.text_of(pdf_of(*PAGES), 20)
    assert found == {"text": "The first page.\nIts ", "n_pages": 3, "cut": True}


def test_a_password_is_named() -> None:
    """A PDF that needs a password is refused as such; one whose password is empty is read."""
    import io

    from pypdf import PdfWriter

    def locked(password: str) -> bytes:
        writer, file = PdfWriter(clone_from=io.BytesIO(pdf_of("Secret"))), io.BytesIO()
        writer.encrypt(password, "owner", algorithm="RC4-128")
        writer.write(file)
        return file.getvalue()

    assert pdf_text.text_of(locked(""), 99) == {"text": "Secret", "n_pages": 1, "cut": False}
    assert pdf_text.text_of(locked("word"), 99) == {"error": "it is protected by a password"}


def test_damaged_pdfs_end_in_a_text_or_an_exception() -> None:
    """300 PDFs with bytes changed, cut or doubled: a text, a refusal, or an exception that the process reports."""
    rng = random.Random(7)
    whole = pdf_of(*PAGES)
    n_read = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randrange(1, 6)):
            at = rng.randrange(len(data))
            change = rng.randrange(3)
            if change == 0:
                data[at] = rng.randrange(256)
            elif change == 1:
                del data[at : at + rng.randrange(1, 40)]
            else:
                data[at:at] = data[max(0, at - 30) : at]
        try:
            found = pdf_text.text_of(bytes(data), 10**6)
        except Exception:
            continue
        assert found.keys() in ({"text", "n_pages", "cut"}, {"error"})
        n_read += "text" in found
    assert 0 < n_read < 300


@pytest.mark.skipif(sys.platform == "win32", reason="the system can't limit processes")
def test_a_process_without_its_starter_ends() -> None:
    """Nobody ends a PDF's process whose starter was killed: the system does, after so much computing."""
    code = "from edgedec_apps.limits import limit; limit(1, DATA=10**9)\nwhile True: pass"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode in (-signal.SIGXCPU, -signal.SIGKILL)


def test_a_text_is_read_as_it_is(tmp_path: Path) -> None:
    """Without a byte order mark; a form feed in it breaks no page."""
    file = tmp_path / "notes ü.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\ftwo\n")
    document = read_document(file)
    assert document == Document("notes ü.txt", "one\r\n\ftwo\n")
    assert document.whole == document.text


def test_a_pdf_is_read_with_its_pages(tmp_path: Path) -> None:
    """By what it begins with, not by its name; whole, it has an empty line between pages that have text."""
    file = tmp_path / "no-ending"
    file.write_bytes(pdf_of(*PAGES))
    document = read_document(file)
    assert (document.name, document.is_paged, document.is_cut) == ("no-ending", True, False)
    assert document.text.split("\f") == list(PAGES)
    assert document.whole == "The first page.\nIts second (line).\n\nThe last page."


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"a\0b", "is no text: it holds zero bytes"),
        (b"\x89PNG\r\n", "is not UTF-8"),
        (b"x" * 2000, "holds more than 1000 bytes"),
        (b"%PDF-1.4\nand nothing else", "it is no PDF, or damaged"),
        (pdf_of("", ""), "its pages have no text"),
        (swelling(300_000_000), "can't be read: "),
    ],
    ids=["zeros", "binary", "long", "damaged", "scanned", "bomb"],
)
def test_what_can_not_be_read_is_refused(tmp_path: Path, data: bytes, words: str) -> None:
    """With the file's name and a reason."""
    file = tmp_path / "file"
    file.write_bytes(data)
    with pytest.raises(RequestError, match=words) as caught:
        read_document(file, most_bytes=1000)
    assert str(file) in str(caught.value)


def test_folders_and_absent_files_are_refused(tmp_path: Path) -> None:
    """A directory is told to be one."""
    for path, words in ((tmp_path, "is a directory"), (tmp_path / "no", "No such file")):
        with pytest.raises(EdgedecError, match=words):
            read_document(path)


def test_a_pdf_keeps_within_memory_and_can_be_cancelled(tmp_path: Path) -> None:
    """Where too little is free it is not begun; a cancelled reading is no document."""
    file, cancel = tmp_path / "a.pdf", CancelToken()
    file.write_bytes(pdf_of("one"))
    with pytest.raises(RequestError, match=r"takes 96\.0 MB of memory"):
        read_document(file, free_bytes=50_000_000)
    cancel.cancel()
    with pytest.raises(CancelledError):
        read_document(file, cancel=cancel)
