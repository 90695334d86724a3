"""Fetching pictures: from hosts that are named, over public addresses, within limits; and nothing else."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from edgedec.errors import CancelledError
from edgedec.progress import CancelToken
from edgedec_apps.server.core import fetching
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fetching import fetch, is_public

PUBLIC, HOSTS = "93.184.215.14", ["img.test", "cdn.test"]
BIG = 2 * fetching.MOST_BYTES


class Handler(BaseHTTPRequestHandler):
    """Answers by path: a redirect to what follows /to/, so many bytes, or none for ever."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """Answer."""
        target, length = "", b"picture"
        if self.path.startswith("/to/"):
            target = self.path.removeprefix("/to/")
        self.send_response(302 if target else 404 if self.path == "/no" else 200)
        if target:
            self.send_header("location", target)
        if self.path == "/big":
            self.send_header("content-length", str(BIG))
            length = b""
        elif self.path == "/slow":
            self.send_header("content-length", "9")
        elif self.path == "/endless":
            self.send_header("connection", "close")
            length = b"x" * (fetching.MOST_BYTES + 70_000)
        else:
            self.send_header("content-length", "7")
        self.end_headers()
        try:
            self.wfile.write(length)
            if self.path == "/slow":
                self.server.stopped.wait(30)  # type: ignore[attr-defined]
        except OSError:
            pass  # the client has seen enough
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """A plain server on loopback, which stands for all hosts."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.stopped = threading.Event()  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.stopped.set()  # type: ignore[attr-defined]
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def reached(port: int, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """Hosts and addresses that are connected to; names are looked up in a table, and TLS is left out."""
    addresses = {"img.test": [PUBLIC], "cdn.test": ["1.1.1.1"], "mixed.test": [PUBLIC, "10.0.0.1"], "meta.test": []}
    addresses["meta.test"] = ["169.254.169.254"]
    found: list[tuple[str, str]] = []

    def connected(host: str, address: str) -> Any:
        found.append((host, address))
        plain = socket.socket()
        plain.connect(("127.0.0.1", port))
        return plain

    def looked_up(host: str, *_: object, **__: object) -> list[Any]:
        return [(0, 0, 0, "", (address, 443)) for address in addresses[host]]

    monkeypatch.setattr(fetching, "_connected", connected)
    monkeypatch.setattr(socket, "getaddrinfo", looked_up)
    return found


def test_a_picture_is_fetched_from_the_address_that_was_looked_at(reached: list[tuple[str, str]]) -> None:
    """The bytes come, also over three redirects, each connected to the address that its name was found to have."""
    assert fetch("https://img.test/a.png?size=1", HOSTS, CancelToken()) == b"picture"
    assert reached == [("img.test", PUBLIC)]
    reached.clear()
    far = "https://IMG.test/to/https://cdn.test/to//to/https://img.test/end"
    assert fetch(far, HOSTS, CancelToken()) == b"picture"
    assert reached == [("img.test", PUBLIC), ("cdn.test", "1.1.1.1"), ("cdn.test", "1.1.1.1"), ("img.test", PUBLIC)]


@pytest.mark.parametrize(
    ("url", "hosts", "words"),
    [
        ("https://img.test/a.png", [], "named none"),
        ("https://other.test/a.png", HOSTS, "named img.test, cdn.test"),
        ("https://img.test.other.test/", HOSTS, "named img.test"),
        ("http://img.test/a.png", HOSTS, "plain https"),
        ("file:///etc/passwd", HOSTS, "plain https"),
        ("https://img.test:8443/", HOSTS, "port 443"),
        ("https://img.test@other.test/", HOSTS, "name and password"),
        ("https://user:word@img.test/", HOSTS, "name and password"),
        ("https://img.test\\@other.test/", HOSTS, "name and password"),
        ("https://img.test/a b", HOSTS, "plain https"),
        ("https://img.test/\nx", HOSTS, "plain https"),
        ("https://[::1", HOSTS, "plain https"),
        ("https://", HOSTS, "plain https"),
        ("https://meta.test/", ["meta.test"], "not public"),
        ("https://mixed.test/", ["mixed.test"], "not public"),
        ("https://img.test/to/https://other.test/", HOSTS, "named img.test"),
        ("https://img.test/to/http://img.test/", HOSTS, "plain https"),
        ("https://img.test/to/https://meta.test/", [*HOSTS, "meta.test"], "not public"),
        ("https://img.test/to//to//to//to//end", HOSTS, "more than 3 times"),
        ("https://img.test/no", HOSTS, "status 404"),
        ("https://img.test/big", HOSTS, f"more than {fetching.MOST_BYTES} bytes"),
        ("https://img.test/endless", HOSTS, f"more than {fetching.MOST_BYTES} bytes"),
    ],
)
def test_what_is_refused(url: str, hosts: list[str], words: str, reached: list[tuple[str, str]]) -> None:
    """Other hosts, schemes, ports, addresses within this network, redirects there, and large files: each a 400."""
    with pytest.raises(ApiError, match=words) as refused:
        fetch(url, hosts, CancelToken())
    assert refused.value.status == 400
    assert all(host in hosts for host, _ in reached)


INSIDE = {
    "this machine and network": "0.0.0.0 0.1.2.3 127.0.0.1 10.0.0.1 172.16.0.1 192.168.0.1 169.254.169.254 100.64.0.1",
    "no host": "192.0.0.1 192.0.2.1 198.18.0.1 198.51.100.1 203.0.113.1 224.0.0.1 239.1.1.1 240.0.0.1 255.255.255.255",
    "6to4's relays": "192.88.99.1",
    "IPv6": ":: ::1 fe80::1 fe80::1%eth0 fec0::1 fc00::1 fd00:ec2::254 ff02::1 ff0e::1 100::1 5f00::1",
    "IPv6 of examples": "2001:db8::1 3fff::1",
    "mapped": "::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:0.1.2.3 ::ffff:224.0.0.1 ::ffff:0:127.0.0.1",
    "compatible": "::127.0.0.1 ::10.0.0.1 ::1.1.1.1",
    "NAT64": "64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b::a00:1 64:ff9b::e000:1 64:ff9b:1::7f00:1 64:ff9b:1::101:101",
    "6to4": "2002:7f00:1:: 2002:a00:1::1 2002:101:101::",
    "Teredo": "2001:0:7f00:1::1 2001:0:101:101::fefe:fefe 2001::1",
}
OUTSIDE = "1.1.1.1 93.184.215.14 2606:4700::1111 2001:4860:4860::8888 2a00:1450::1 ::ffff:1.1.1.1 64:ff9b::101:101"


@pytest.mark.parametrize("kind", INSIDE)
def test_addresses_that_are_not_public(kind: str) -> None:
    """No address of this machine or network, in whatever form it is written, nor one that a tunnel may lead there."""
    assert [address for address in INSIDE[kind].split() if is_public(address)] == []
    assert [address for address in OUTSIDE.split() if not is_public(address)] == []


def test_a_slow_host(reached: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that does not end in time is an error; one that is cancelled ends at once."""
    cancel = CancelToken()
    threading.Timer(0.1, cancel.cancel).start()
    with pytest.raises(CancelledError):
        fetch("https://img.test/slow", HOSTS, cancel)
    monkeypatch.setattr(fetching, "MOST_SECONDS", 0.2)
    with pytest.raises(ApiError, match=r"longer than 0\.2 s"):
        fetch("https://img.test/slow", HOSTS, CancelToken())
