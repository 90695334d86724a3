"""Connections that say nothing, little or slowly hold up nobody; one that is closed by half is answered."""

import json
import re
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.processes.running_server import ENDLESS, PATIENCE_S, Running, messages, metric, started, wait_until

HALF_HEADER = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Half: "
ASKED = json.dumps({"messages": messages("x"), "max_tokens": 3, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def few(chat_path: Path) -> Iterator[Running]:
    """A server of eight connections, four of one address; a header has two seconds to come."""
    limits: dict[str, Any] = {"n_connections": 8, "n_per_address": 4, "header_timeout_s": 2.0, "body_timeout_s": 1.0}
    with started(chat_path, api_key="sesame", **limits) as running:
        yield running


@pytest.fixture(scope="module")
def patient(chat_path: Path) -> Iterator[Running]:
    """A server of as many connections, for texts without an end; no time is up while this machine does other things."""
    limits: dict[str, Any] = dict.fromkeys(("header_timeout_s", "body_timeout_s"), 10 * PATIENCE_S)
    limits |= {"n_connections": 8, "n_per_address": 4}
    with started(chat_path, api_key="sesame", load_options={"n_ctx": 100_000}, **limits) as running:
        yield running


@contextmanager
def connected(running: Running, n: int = 1, source: str = "127.0.0.1") -> Iterator[list[socket.socket]]:
    """Open connections of an address of this machine."""
    host, port = running.url.removeprefix("http://").split(":")
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection((host, int(port)), PATIENCE_S, (source, 0))) for _ in range(n)
        ]


def request(path: str = "/v1/chat/completions", body: bytes = ASKED, more: str = "", version: str = "1.1") -> bytes:
    head = f"POST {path} HTTP/{version}\r\nHost: localhost\r\nAuthorization: Bearer sesame\r\n{more}"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


def rest(connection: socket.socket) -> bytes:
    """Return what comes until the other side closes the connection."""
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def is_closed(connection: socket.socket) -> bool:
    """Return whether the server has closed a connection."""
    connection.setblocking(False)
    try:
        return connection.recv(65536) == b""
    except BlockingIOError:
        return False
    except ConnectionError:
        return True


@pytest.mark.slow
def test_half_headers_keep_nobody_out(chat_path: Path) -> None:
    """With 560 connections that send half a header and stop, without a key, others are answered at once."""
    wait_s = 10 * PATIENCE_S  # no connection is closed for its half header meanwhile
    with started(chat_path, api_key="sesame", header_timeout_s=wait_s) as running, connected(running, 560) as silent:
        for connection in silent:
            connection.sendall(HALF_HEADER)
        assert running.client.post("/v1/chat/completions", content=ASKED).status_code == 200
        assert httpx.get(f"{running.url}/health", timeout=PATIENCE_S).status_code == 200


@pytest.mark.slow
def test_a_header_that_does_not_come(few: Running) -> None:
    """After its time a connection without a whole header is closed, however slowly more of it comes."""
    with connected(few) as (silent,), connected(few) as (slow,):
        slow.sendall(HALF_HEADER)
        wait_until(lambda: trickled(slow), "the connection is still there")
        assert rest(silent).startswith(b"HTTP/1.1 408 ")


@pytest.mark.slow
def test_a_second_header_that_does_not_come(few: Running) -> None:
    """The same for a second request on a connection."""
    with connected(few) as (connection,):
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /hea")
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"HTTP/1.1 408 " in answer


def test_the_oldest_that_waits_makes_room(patient: Running) -> None:
    """A fifth connection of an address closes its oldest without a whole header, not one that was answered, or asks."""
    patient.client.get("/health")  # one that is between two requests
    wait_until(lambda: metric(patient, "connections") == 1, "those of the test before are still there")
    with connected(patient, 2) as (first, second), connected(patient) as (third,):
        first.sendall(HALF_HEADER)
        wait_until(lambda: metric(patient, "connections") == 4, "they are not there")
        with connected(patient) as (fourth,):
            wait_until(lambda: is_closed(first), "the oldest is still there")
            assert (is_closed(second), is_closed(third), is_closed(fourth)) == (False, False, False)
            assert patient.client.get("/health").status_code == 200


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere loopback has one address")
def test_other_addresses_have_places_of_their_own(patient: Running) -> None:
    """Where an address has all of its connections and each has a request, another one is answered still."""
    endless = request(body=json.dumps(ENDLESS | {"stream": False}).encode())
    patient.client.get("/health")
    with (
        started_requests(patient, 3, endless),
        connected(patient, source="127.0.0.2") as (other,),
        connected(patient) as (fifth,),
    ):
        with suppress(
            httpx.ReadError, httpx.RemoteProtocolError
        ):  # the client's connection may be the idle one that gives way to the fifth
            patient.client.get("/health")
        other.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert rest(other).startswith(b"HTTP/1.1 200 ")
        fifth.close()


@contextmanager
def started_requests(running: Running, n: int, data: bytes) -> Iterator[None]:
    """Ask so many times and wait until the server has the requests."""
    with connected(running, n) as asking:
        for connection in asking:
            connection.sendall(data)
        queue = running.queue
        wait_until(lambda: queue.n_running + queue.n_waiting == n, "they are not there")
        yield


@pytest.mark.slow
def test_where_all_are_busy_a_new_one_is_refused(chat_path: Path) -> None:
    """With a whole request on every connection, one more is told so with a 503 and when to ask again."""
    few: dict[str, Any] = {"n_connections": 2, "n_per_address": 2, "origins": ("https://good.example",)}
    with started(chat_path, load_options={"n_ctx": 100_000}, **few) as running:
        running.client.close()
        endless = request(body=json.dumps(ENDLESS | {"stream": False}).encode())
        with started_requests(running, 2, endless), connected(running) as (third,):
            third.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nOrigin: https://good.example\r\n\r\n")
            answer = rest(third)
        wait_until(lambda: running.service.n_connections == 0, "they go on")
        with connected(running) as (again,):
            again.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            assert rest(again).startswith(b"HTTP/1.1 200 ")
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5\r\n" in answer
    assert b'"code":"busy"' in answer
    assert b"access-control-allow-origin: https://good.example\r\n" in answer


@pytest.mark.slow
def test_a_body_that_nobody_reads_comes_to_an_end(few: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that was refused by its header keeps no connection by sending its body forever."""
    monkeypatch.setattr("edgedec_apps.server.connections._SLACK_S", 0.5)
    with connected(few) as (connection,):
        connection.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 401 ")
        wait_until(lambda: trickled(connection), "the connection is still there")


def trickled(connection: socket.socket) -> bool:
    """Send a byte; return whether the connection is gone."""
    time.sleep(0.05)
    try:
        return connection.send(b"x") != 1
    except ConnectionError:
        return True


@pytest.mark.slow
def test_an_answer_that_nobody_reads(few: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks and reads nothing of its answers is dropped when its time is over."""
    monkeypatch.setattr("edgedec_apps.server.connections._SLACK_S", 0.5)
    monkeypatch.setattr(few.service, "settings", replace(few.service.settings, timeout_s=0.5))
    few.client.get("/health")
    n_before = metric(few, "connections")
    with connected(few) as (connection,):
        connection.setblocking(False)
        with suppress(BlockingIOError):
            while True:
                connection.send(b"GET /static/app.js HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        wait_until(lambda: metric(few, "connections") == n_before + 1, "it is not there")
        wait_until(lambda: metric(few, "connections") == n_before, "it is still there")


@pytest.mark.parametrize("version", ["1.1", "1.0"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_closes_its_half_is_answered(server: Running, version: str, stream: bool) -> None:
    """After shutdown(SHUT_WR) behind the request the answer comes, whole or as a stream, and then the end."""
    asked = json.loads(ASKED) | {"stream": stream}
    with connected(server) as (connection,):
        connection.sendall(request(body=json.dumps(asked).encode(), version=version))
        connection.shutdown(socket.SHUT_WR)
        answer = rest(connection)
    interim, _, final = answer.rpartition(b"HTTP/1.1 200 OK\r\n")
    assert interim in ((b"", b"HTTP/1.1 100 Continue\r\n\r\n") if version == "1.1" else (b"",))
    text = server.client.post("/v1/chat/completions", content=ASKED).json()["choices"][0]["message"]["content"]
    if stream:
        assert b"data: [DONE]" in final
        return
    document = json.loads(final.partition(b"\r\n\r\n")[2])
    assert document["choices"][0]["message"]["content"] == text


def test_two_requests_and_then_the_end(server: Running) -> None:
    """Both of two requests in a row are answered where the client closes its half behind them; half a third is not."""
    for more in (b"", b"POST /v1/chat", request()[:-5]):
        with connected(server) as (connection,):
            connection.sendall(request() + request() + more)
            connection.shutdown(socket.SHUT_WR)
            assert rest(connection).count(b"HTTP/1.1 200 OK\r\n") == 2


def test_half_a_request_and_the_end(server: Running) -> None:
    """A client that closes its half in the middle of its request gets no answer, and keeps nothing."""
    queue = server.queue
    wait_until(lambda: queue.n_running + queue.n_waiting == 0, "a test before left a text that goes on")
    before = server.service.memory.n_taken  # by responses that are kept
    for part in (b"", HALF_HEADER, request()[:-5]):
        with connected(server) as (connection,):
            connection.sendall(part)
            connection.shutdown(socket.SHUT_WR)
            assert b"200 OK" not in rest(connection)
    wait_until(lambda: server.service.memory.n_taken <= before, "it is not given back")


MALFORMED = (
    *(b"\r\n\r\n", b"hello\r\n\r\n", b"GET /health\r\n\r\n", b"GET /health HTTP/9.9\r\n\r\n", b"\x00" * 100),
    *(b"\x16\x03\x01\x02\x00\x01\x00", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET /\xff HTTP/1.1\r\n\r\n"),
    b"GET /a b HTTP/1.1\r\n\r\n",
    *(
        b"GET / HTTP/1.1\r\n" + more + b"\r\n\r\n"
        for more in (b"no colon", b"a b: c", b": x", b"Host: a\r\nHost: b", b"a: \x00")
    ),
    *(
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + n + b"\r\n\r\nx"
        for n in (b"x", b"1\r\nContent-Length: 2", b"-1", b"9" * 30)
    ),
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: x\r\n\r\nx",
    b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nx",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000,
    b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET http://localhost/health HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"GET / HTTP/1.0\r\n\r\n",
)


@pytest.mark.parametrize("before", [b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"])
def test_what_is_no_request_is_answered(server: Running, before: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Bytes that are no header, as the first or the second request of a connection, leave no traceback in the log."""
    for data in MALFORMED:
        with connected(server) as (connection,), suppress(ConnectionError):
            connection.sendall(before + data)
            with suppress(OSError):  # the server may have closed it by then
                connection.shutdown(socket.SHUT_WR)
            assert re.match(rb"HTTP/1\.1 [1-5][0-9]{2} ", rest(connection)) or data == b"\r\n\r\n", data
    assert server.client.get("/health").status_code == 200
    assert not [record.getMessage() for record in caplog.records if record.levelname == "ERROR" or record.exc_info]


@pytest.mark.slow
def test_a_client_that_leaves_altogether_is_noticed(endless: Running) -> None:
    """One that closes its connection, which begins as a closed half does, stops its text, or waits no longer."""
    body = json.dumps(ENDLESS | {"stream": False}).encode()
    queue = endless.queue
    with connected(endless, 2) as asking:
        for connection in asking:
            connection.sendall(request(body=body))
        wait_until(lambda: (queue.n_running, queue.n_waiting) == (1, 1), "they are not there")
        asking[0].shutdown(socket.SHUT_WR)
        asking[1].shutdown(socket.SHUT_WR)
        time.sleep(0.3)
        assert (queue.n_running, queue.n_waiting) == (1, 1)
    wait_until(lambda: (queue.n_running, queue.n_waiting) == (0, 0), "the texts go on")
