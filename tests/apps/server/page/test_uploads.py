"""PDFs that the web chat is given: their texts, and what is refused, with a reason, by whatever the file holds."""

import sys
import threading
from pathlib import Path

import httpx
import pytest
from support.processes.running_server import PATIENCE_S, Running, started, wait_until
from support.texts.pdf_files import pdf_of, swelling

from edgedec_apps.documents import files
from edgedec_apps.server.page import api

pytestmark = pytest.mark.slow

PAGES = ("The first page.\nIts second (line).", "", "The last page.")


def send(server: Running, data: bytes, **headers: str) -> httpx.Response:
    """Send a PDF as the page does."""
    return server.client.post("/page/pdf", content=data, headers={"content-type": "application/pdf", **headers})


def message(reply: httpx.Response, status: int) -> str:
    """Return the message of a refusal of this status."""
    assert reply.status_code == status, reply.text
    return str(reply.json()["error"]["message"])


def test_one_program_reads_no_pdfs(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that is packed into one program says so, and what to do."""
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    words = message(send(server, pdf_of(*PAGES)), 501)
    assert "packed into one program" in words
    assert "attach the text itself" in words


def test_only_the_page_itself_and_the_key_may_send_files(chat_path: Path) -> None:
    """Pages of other origins are refused as everywhere, and a server with a key wants it."""
    with started(chat_path, api_key="secret") as running:
        assert "API key" in message(httpx.post(f"{running.url}/page/pdf", content=pdf_of("a")), 401)
        assert "may not use this server" in message(send(running, pdf_of("a"), origin="https://evil.example"), 403)
        load = running.client.post("/api/generate", json={"model": "tiny"}, headers={"origin": "https://evil.example"})
        assert load.status_code == 403
        assert httpx.post(f"{running.url}/api/generate", json={"model": "tiny"}).status_code == 401
        assert running.client.get("/page/pdf").status_code == 405


def test_the_text_of_a_pdf(server: Running) -> None:
    """Pages with form feeds between them; a page without text counts."""
    found = send(server, pdf_of(*PAGES)).json()
    assert found == {"text": "The first page.\nIts second (line).\f\fThe last page.", "n_pages": 3, "cut": False}


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "does not begin with %PDF-"),
        (b"PK\x03\x04 no pdf", "does not begin with %PDF-"),
        (b"%PDF-1.4\nand nothing else", "it is no PDF, or damaged"),
        (pdf_of("", ""), "its pages have no text"),
        (pdf_of("a").replace(b"/Kids [4 0 R]", b"/Kids [2 0 R]"), "the PDF can't be read"),  # a page tree in a circle
    ],
)
def test_what_is_no_pdf_with_a_text_is_refused(server: Running, data: bytes, words: str) -> None:
    """With a reason, and the server goes on."""
    assert words in message(send(server, data), 400)
    assert server.client.get("/health").status_code == 200


def test_a_file_that_swells_is_stopped(server: Running) -> None:
    """Some kilobytes that become 300 MB are refused, and this process does not hold them."""
    data, before = swelling(300_000_000), server.service.memory.n_taken  # by responses that earlier tests kept
    assert len(data) < server.service.settings.max_body_bytes
    assert "the PDF can't be read" in message(send(server, data), 400)
    wait_until(lambda: server.service.memory.n_taken <= before, "the memory is not given back")


def test_what_takes_too_long_is_ended(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed, and the reply says why."""
    monkeypatch.setattr(api, "_PATIENCE_S", 0.001)
    assert "it took longer than 0.001 s to read" in message(send(server, pdf_of(*PAGES)), 400)


def test_memory_and_size_are_bounded(chat_path: Path) -> None:
    """A server with little memory for requests says so; a body that is too large is refused as everywhere."""
    with started(chat_path, room_bytes=40_000_000, max_body_bytes=10_000) as running:
        assert "takes at least 48.0 MB of memory" in message(send(running, pdf_of("a")), 413)
        assert "more than the 10000 bytes allowed" in message(send(running, b"%PDF-" + b"0" * 20_000), 413)
        wait_until(lambda: running.service.memory.n_taken == 0, "the memory is not given back")


def test_a_server_that_ends_ends_the_process(chat_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PDF that is being read does not hold the end up: the process that reads it is ended."""
    reading = tmp_path / "reading"
    code = f"import pathlib, time; pathlib.Path({str(reading)!r}).touch(); time.sleep(600)"
    monkeypatch.setattr(files, "command", lambda limits: [sys.executable, "-c", code])
    monkeypatch.setattr(api, "_PATIENCE_S", 600.0)
    with started(chat_path) as running:
        replies: list[httpx.Response] = []

        def ask() -> None:
            replies.append(httpx.post(f"{running.url}/page/pdf", content=pdf_of("a"), timeout=60))

        asking = threading.Thread(target=ask)
        asking.start()
        wait_until(reading.exists, "nothing is read")
    asking.join(PATIENCE_S)
    assert not asking.is_alive()
    assert [reply.status_code for reply in replies] in ([400], [503], [])
