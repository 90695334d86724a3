"""Servers that send too much, too slowly, or something else: answers are bounded, and an error says what was found."""

import gzip
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from itertools import repeat
from pathlib import Path

import pytest
from support.processes.command_line import run_here
from support.processes.servers import StubServer, model_bytes

from edgedec.errors import CancelledError, EdgedecError, ModelFormatError, ModelNotFoundError, PullError, StorageError
from edgedec.load_options import ResolveOptions
from edgedec.progress import CancelToken
from edgedec_models.fetching import documents
from edgedec_models.hubs.search import search_hub
from edgedec_models.resolve import pull, resolve

Pieces = Callable[[], Iterator[bytes]]
LISTING, SEARCH = "/api/models/a/b/revision/main", "/api/models"
SMALL_BYTES = 1 << 20


class Raw:
    """A server on 127.0.0.1 that answers every request with the same pieces of bytes."""

    def __init__(self, pieces: Pieces, pause: threading.Event | None) -> None:
        self._pieces, self._pause = pieces, pause
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.root = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.n_requests, self.n_sent = 0, 0
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        """Take no more requests."""
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.n_requests += 1
            with connection:
                try:
                    connection.recv(1 << 16)
                    for piece in self._pieces():
                        connection.sendall(piece)
                        self.n_sent += len(piece)
                        if self._pause is not None:
                            self._pause.wait(0.01)
                except OSError:  # the client has enough
                    pass


@contextmanager
def serving(pieces: Pieces, monkeypatch: pytest.MonkeyPatch, pause: threading.Event | None = None) -> Iterator[Raw]:
    """Run a Raw server that is also the hub and the package index."""
    with closing(Raw(pieces, pause)) as raw:
        monkeypatch.setenv("HF_ENDPOINT", raw.root)
        monkeypatch.setenv("EDGEDEC_PYPI_INDEX", f"{raw.root}/simple")
        yield raw


def answer(body: bytes, *headers: str, length: int | None = None) -> bytes:
    """Return a whole answer of HTTP."""
    n_bytes = len(body) if length is None else length
    lines = ["HTTP/1.1 200 OK", f"Content-Length: {n_bytes}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def ask_all(raw: Raw) -> dict[str, str]:
    """Return the error of each way to ask a hub; each has asked once."""
    asked: dict[str, Callable[[], object]] = {
        "hf:": lambda: resolve("hf:a/b", ResolveOptions()),
        "search": lambda: search_hub(["x"], 5, ResolveOptions()),
    }
    found = {}
    for name, ask in asked.items():
        before = raw.n_requests
        with pytest.raises(PullError) as caught:
            ask()
        found[name] = str(caught.value)
        assert raw.n_requests == before + 1, found
    return found


def test_an_endless_answer_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more is read than an answer may have, with a length and without one."""
    monkeypatch.setattr(documents, "MOST_JSON_BYTES", SMALL_BYTES)
    block = b'{"id": "a/b"},' * 1000
    heads = (
        b"HTTP/1.1 200 OK\r\n\r\n[",
        b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999\r\n\r\n[",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    )
    for head in heads:
        piece = b"%x\r\n%b\r\n" % (len(block), block) if b"chunked" in head else block

        def endless(head: bytes = head, piece: bytes = piece) -> Iterator[bytes]:
            yield head
            yield from repeat(piece)

        with serving(endless, monkeypatch) as raw:
            for message in ask_all(raw).values():
                assert "sends more than 1 MiB" in message
            assert raw.n_sent < 2 * SMALL_BYTES + (16 << 20)  # what the system's buffers hold


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX-Slow: ", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_an_answer_that_drips_ends(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    """An answer of a byte now and then is given up after MOST_S, be they of its headers or of its body."""
    monkeypatch.setattr(documents, "MOST_S", 0.1)
    slowly = threading.Event()

    def drip() -> Iterator[bytes]:
        yield head
        yield from repeat(b" ")

    with serving(drip, monkeypatch, slowly) as raw:
        names = ["hf:a/b"] + ([f"{raw.root}/m.gguf"] if b"Slow" in head else [])
        for name in names:
            with pytest.raises(PullError, match=r"did not come within 0 s \(tried 4 times\)"):
                resolve(name, ResolveOptions())


def test_waiting_for_an_answer_can_be_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that says nothing keeps nobody from cancelling."""
    cancel = CancelToken()

    def silence() -> Iterator[bytes]:
        cancel.cancel()
        yield b""
        threading.Event().wait(5)

    with serving(silence, monkeypatch), pytest.raises(CancelledError):
        resolve("hf:a/b", ResolveOptions(cancel=cancel))


OTHERS: list[tuple[bytes, str]] = [
    (b"<html>Please sign in</html>", "27 bytes that are no JSON and begin with '<html>Please"),
    (b"[" * 200_000, "nested too deep and begin with"),
    (b'{"a":' * 100_000, "nested too deep and begin with"),
    (b"", "0 bytes that are no JSON"),
    (b"\xff\xfe\xff", "no JSON"),
    (b"9" * 5000, "no JSON"),
    (b"null", "None where"),
    (b'"text"', "'text' where"),
    (b"7", "7 where"),
]
LISTINGS: list[tuple[object, str]] = [
    ({"siblings": "x"}, "'x' where a list as siblings"),
    ({"siblings": [7]}, "7 where an object in siblings"),
    ({"siblings": [{"rfilename": 7}]}, "7 where a file's name"),
    ({"siblings": [{"rfilename": "a\ud800.gguf"}]}, "where a file's name"),
    ({"siblings": [{"rfilename": "a.gguf", "size": "1"}]}, "'1' where a number of bytes"),
    ({"siblings": [{"rfilename": "a.gguf", "size": -1}]}, "-1 where a number of bytes"),
    ({"siblings": [{"rfilename": "a.gguf", "lfs": "x"}]}, "'x' where an object as lfs"),
    ({"siblings": [{"rfilename": "a.gguf", "lfs": {"sha256": "zz"}}]}, "'zz' where 64 hex digits"),
    ({"sha": "../..", "siblings": []}, "'../..' where a commit"),
    ({"sha": 7, "siblings": []}, "7 where a commit"),
]


def test_what_is_no_answer_of_a_hub_is_named(server: StubServer) -> None:
    """The error says what was found, and the hub is asked once, for it would say the same again."""

    def failure(path: str, body: bytes) -> str:
        server.seen.clear()
        server.add(path, body)
        with pytest.raises(PullError, match="does not answer as a Hugging Face hub does") as caught:
            resolve("hf:a/b", ResolveOptions()) if path == LISTING else search_hub(["x"], 5, ResolveOptions())
        assert len(server.seen) == 1
        return str(caught.value)

    for body, words in OTHERS:
        assert words in failure(LISTING, body)
        assert words in failure(SEARCH, body)
    for value, words in LISTINGS:
        assert words in failure(LISTING, json.dumps(value).encode())
    for value, words in (({"id": 7}, "{'id': 7} where"), (7, "7 where"), ({}, "{} where")):
        assert words in failure(SEARCH, json.dumps([value]).encode())
    assert "{} where a list" in failure(SEARCH, b"{}")


@pytest.mark.slow
def test_a_compressed_answer_is_not_unpacked(server: StubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody asked for it, and a few bytes might become gigabytes; nor is a strange charset used."""
    bomb = gzip.compress(bytes(50 << 20))
    for coding in ("gzip", "deflate", "br"):
        with serving(lambda coding=coding: iter([answer(bomb, f"Content-Encoding: {coding}")]), monkeypatch) as raw:  # type: ignore[misc]  # bound at once
            for message in ask_all(raw).values():
                assert f"sends its answer compressed ({coding})" in message
    page = documents.Document(server.root, "text/html; charset=zlib", b"<a>\xff")
    assert page.text == "<a>\ufffd"


def test_lengths_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer that ends before its length is tried again; one that is longer is cut there, and is no JSON."""
    body = b'{"siblings": []}'
    with serving(lambda: iter([answer(body, length=len(body) + 5)]), monkeypatch) as raw:
        with pytest.raises(PullError, match="tried 4 times"):
            resolve("hf:a/b", ResolveOptions())
        assert raw.n_requests == 4
    with serving(lambda: iter([answer(body, length=len(body) - 5)]), monkeypatch) as raw:
        assert "no JSON" in ask_all(raw)["hf:"]


@pytest.mark.slow
def test_headers_that_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Headers with numbers and addresses that are none end in an error that edgedec knows."""
    model = model_bytes(1000)
    heads = [
        answer(model, "Content-Range: bytes 0-1/" + "9" * 5000),
        answer(model, 'ETag: "\xe4"'),
        answer(model, "Last-Modified: \xe4"),
        b"HTTP/1.1 503 Busy\r\nRetry-After: \xb2\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:99999/\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: file:///etc/hostname\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\n",
        b"HTTP/9.9 what\r\n\r\n",
        b"\x00" * 100,
        b"",
    ]
    for i, head in enumerate(heads):
        with serving(lambda head=head: iter([head]), monkeypatch) as raw:  # type: ignore[misc]  # bound at once
            for name in (f"{raw.root}/{i}.gguf", "hf:a/b"):
                with suppress(EdgedecError):
                    assert pull(name, ResolveOptions()).read_bytes() == model
            assert raw.n_requests <= 2 * 21  # the most redirects, twice


def test_addresses_that_are_none() -> None:
    """What is no address, or longer than a path can be, is refused as what it is."""
    for name in ("http://[x", "https://a:x/m.gguf", "http://\ud800/m.gguf", "file://[", "ollama:" + "a" * 300):
        with pytest.raises((ModelNotFoundError, StorageError)):
            resolve(name, ResolveOptions(offline=True))


def test_a_manifest_of_ollama_has_a_bound(tmp_path: Path) -> None:
    """A manifest that is nested too deep, or too large, is none."""
    manifest = tmp_path / "ollama" / "manifests" / "registry.ollama.ai" / "library" / "m" / "latest"
    manifest.parent.mkdir(parents=True)
    for text in ("[" * 200_000, " " * 2_000_000):
        manifest.write_text(text)
        with pytest.raises(ModelFormatError, match="is not one of Ollama's"):
            resolve("ollama:m", ResolveOptions())


def test_ps_reads_a_bounded_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers in place of an edgedec server can't fill the memory, either."""

    def endless() -> Iterator[bytes]:
        yield b"HTTP/1.1 200 OK\r\n\r\n"
        yield from repeat(b"[" * 100_000)

    with serving(endless, monkeypatch) as raw:
        run_here("ps", "--server", raw.root).failed(20, "sends more than 8 MiB")
    with serving(lambda: iter([answer(b"[" * 200_000)]), monkeypatch) as raw:
        run_here("ps", "--server", raw.root).failed(40, "no edgedec server")
