"""The memory for requests: what they may take together, who waits for it, and what is refused."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.processes.running_server import ENDLESS, PATIENCE_S, Running, messages, started, wait_until

from edgedec_apps.server.core.budget import MemoryBudget, RequestMemory
from edgedec_apps.server.core.errors import ApiError

pytestmark = pytest.mark.slow

ROOM_BYTES = 4_000_000
SMALL = {"messages": messages("x"), "max_tokens": 2}


@pytest.fixture(scope="module")
def narrow(chat_path: Path) -> Iterator[Running]:
    """A server whose requests may take 4 MB together."""
    with started(chat_path, n_parallel=2, room_bytes=ROOM_BYTES, body_timeout_s=3.0) as running:
        yield running


def test_a_share_waits_until_there_is_room() -> None:
    """Who wants more than there is waits; who leaves wakes the first for whom there is enough then."""

    async def scene() -> None:
        budget, order = MemoryBudget(1600), list[str]()
        first, second, small = (RequestMemory(budget, PATIENCE_S) for _ in range(3))
        await first.grow(1000)

        async def ask(memory: RequestMemory, name: str, n_bytes: int) -> None:
            await memory.grow(n_bytes)
            order.append(name)

        tasks = [asyncio.create_task(ask(second, "large", 900)), asyncio.create_task(ask(small, "small", 100))]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (order, budget.n_taken) == (["small"], 1100)  # there is always some for a small one
        first.close()
        await asyncio.wait(tasks)
        assert (order, budget.n_taken) == (["small", "large"], 1000)
        second.close()
        small.close()
        small.close()
        assert budget.n_taken == 0

    asyncio.run(scene())


def test_a_share_that_is_too_large_or_too_late_is_refused() -> None:
    """More than one request may have is refused at once (413), and what has waited too long with 503."""

    async def scene() -> None:
        budget = MemoryBudget(1600)
        first, second = RequestMemory(budget, PATIENCE_S), RequestMemory(budget, 0.01)
        with pytest.raises(ApiError, match=r"needs about 1\.4 kB of memory, .* one request may use 1\.4 kB") as refused:
            await first.grow(1401)
        assert refused.value.status == 413
        await first.grow(1400)
        with pytest.raises(ApiError, match="use all the memory for requests") as busy:
            await second.grow(101)
        assert (busy.value.status, busy.value.retry_after_s, budget.n_taken) == (503, 5, 1400)
        async with second.more(100):
            assert budget.n_taken == 1500
        assert budget.n_taken == 1400

    asyncio.run(scene())


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":"' + b"a b " * 400_000 + b'"}',
        '{{"prompt":"{}"}}'.format("中" * 300_000).encode(),
        b'{"prompt":"' + b"a" * 400_000 + b'\\ud83d\\ude00"}',
        b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * 9000) + b"]}",
        b'{"messages":[' + b",".join([b"{}"] * 90_000) + b"]}",
        b'{"messages":[' + b"[" * 9000 + b"]" * 9000 + b"," + b",".join([b"[]"] * 9000) + b"]}",
        b'{"messages":"' + b'\\"' * 1_000_000,
    ],
    ids=["text", "wide text", "one wide character", "messages", "objects", "lists", "quotes"],
)
def test_what_takes_too_much_memory_is_refused(narrow: Running, body: bytes) -> None:
    """A body that would take more than one request may have is a 413 before it is read as JSON."""
    reply = narrow.client.post("/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
    assert "of memory, and one request may use 3.5 MB" in reply.json()["error"]["message"]
    wait_until(lambda: narrow.service.memory.n_taken == 0, "it is not given back")


def test_marks_within_texts_are_no_values(narrow: Running) -> None:
    """A text of braces and commas takes what a text takes: it is refused for its length, not for its structure."""
    chat = {"messages": messages('{[,:\\"' * 20_000)}
    assert narrow.client.post("/v1/chat/completions", json=chat).json()["error"]["code"] == "context_length_exceeded"


@pytest.mark.parametrize("chunked", [False, True], ids=["with a length", "in chunks"])
def test_bodies_in_flight_stay_within_the_room(narrow: Running, chunked: bool) -> None:
    """Of forty bodies that come half, as many are read as there is room for; a small request is answered meanwhile."""
    host, port = narrow.url.removeprefix("http://").split(":")
    size = 800_000
    framing = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{framing}\r\n\r\n"
    part = b"x" * (size // 2)
    with ExitStack() as connections:
        for _ in range(40):
            connection = connections.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
            connection.sendall(head.encode())
            connection.setblocking(False)
            with suppress(BlockingIOError):
                connection.send(b"%x\r\n" % len(part) + part if chunked else part)
        wait_until(lambda: narrow.service.memory.n_taken > ROOM_BYTES // 2, "nothing is read")
        assert narrow.client.post("/v1/chat/completions", json=SMALL).status_code == 200
        assert narrow.service.memory.n_taken <= ROOM_BYTES
    wait_until(lambda: narrow.service.memory.n_taken == 0, "it is not given back")


def test_bodies_that_do_not_come_give_way(narrow: Running) -> None:
    """Where all the room is taken for bodies that do not come, a small request has it before their time is over."""
    narrow.service.settings = replace(narrow.service.settings, body_timeout_s=10 * PATIENCE_S)
    with ExitStack() as connections:
        for size in (800_000, 60_000, *[10_000] * 60, *[100] * 5):
            connections.enter_context(narrow.posting(b"", size))
        wait_until(lambda: narrow.service.memory.n_taken > ROOM_BYTES - 1000, "it is not taken")
        assert narrow.client.post("/v1/chat/completions", json=SMALL | {"user": "u" * 1000}).status_code == 200
    narrow.service.settings = replace(narrow.service.settings, body_timeout_s=3.0)


def test_a_request_takes_its_share_until_it_is_answered(endless: Running) -> None:
    """While a text is made its request counts; afterwards, or when its client leaves, nothing is left of it."""
    with endless.client.stream("POST", "/v1/chat/completions", json=ENDLESS) as reply:
        lines = reply.iter_lines()  # dropping these closes the stream
        next(lines)
        assert endless.service.memory.n_taken > len(json.dumps(ENDLESS))
        shown = endless.client.get("/metrics").text
        assert f"edgedec_request_bytes_limit {endless.service.memory.n_total}\n" in shown
    wait_until(lambda: endless.service.memory.n_taken == 0, "it is not given back")


class _Held:
    """What a thread does for a prompt, waiting for a sign the first time."""

    def __init__(self, value: Any) -> None:
        self.begun, self.go, self.value = threading.Event(), threading.Event(), value

    def run(self, *_given: Any, **_options: Any) -> Any:
        if not self.begun.is_set():
            self.begun.set()
            assert self.go.wait(PATIENCE_S)
        return self.value


@pytest.mark.parametrize(
    ("path", "body", "part", "name", "value"),
    [
        ("/v1/chat/completions", SMALL, "template", "render", "x"),
        ("/tokenize", {"content": "x"}, "tokenizer", "encode", [1]),
    ],
)
def test_a_client_that_leaves_while_its_prompt_is_read(
    chat_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, body: Any, part: str, name: str, value: Any
) -> None:
    """It is read before its request has a place: others are answered. A thread has model and memory until it ends."""
    held = _Held(value)
    with started(chat_path, n_parallel=1, n_queue=1) as running:
        monkeypatch.setattr(type(getattr(running.engine, part)), name, held.run)
        queue, memory = running.queue, running.service.memory
        try:
            with running.posting(json.dumps(body).encode(), path=path):
                assert held.begun.wait(PATIENCE_S)
                n_taken, (cancel,) = memory.n_taken, running.service._running
                assert (queue.n_running, queue.n_waiting) == (0, 1)
                assert running.client.post("/v1/completions", json={"prompt": [1], "max_tokens": 2}).status_code == 200
            wait_until(lambda: cancel.cancelled, "it is not told")  # a real template ends here
            assert running.client.get("/health").status_code == 200
            wait_until(lambda: (running.entry.n_references, memory.n_taken) == (1, n_taken), "it has less or more")
        finally:
            held.go.set()
        wait_until(lambda: (queue.n_waiting, running.entry.n_references, memory.n_taken) == (0, 0, 0), "it goes on")
        assert running.client.post("/v1/chat/completions", json=SMALL).status_code == 200


def test_a_prompt_that_does_not_fit_is_told_without_waiting(endless: Running) -> None:
    """It is refused while another text has the only place, not when its turn would come."""
    with endless.client.stream("POST", "/v1/chat/completions", json=ENDLESS) as reply:
        lines = reply.iter_lines()  # dropping these closes the stream
        next(lines)
        refused = endless.client.post("/v1/completions", json={"prompt": "a" * 200_000})
        assert endless.queue.n_running == 1
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    wait_until(lambda: endless.queue.n_running == 0, "it goes on")


def test_a_body_waits_for_room_and_is_answered(narrow: Running) -> None:
    """A large body that comes while the room is taken is read, and answered, once there is room."""
    answers: list[httpx.Response] = []
    large = {"messages": messages("x"), "max_tokens": 2, "user": "u" * 500_000}
    with narrow.posting(b"{", 800_000):
        wait_until(lambda: narrow.service.memory.n_taken == 3_200_000, "it is not read")
        other = threading.Thread(
            target=lambda: answers.append(
                httpx.post(f"{narrow.url}/v1/chat/completions", json=large, timeout=PATIENCE_S)
            )
        )
        other.start()
        wait_until(lambda: narrow.service.memory.n_waiting == 1, "nobody waits")
    other.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200]
