"""Streams are never silent for long: their header comes when the request is taken, and news of no news while it waits.

The seconds of silence are the parameter `quiet_s`, so nothing here waits for them.
"""

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.processes.running_server import ENDLESS, PATIENCE_S, Running, messages, started, wait_until

pytestmark = pytest.mark.slow

_COMMENT = rb"(?::[^\n]*\n\n)"
_PING = rb"(?:event: ping\ndata: \{\"type\": \"ping\"\}\n\n)"
_EMPTY = rb"(?:\{[^\n]*(?:\"content\"|\"response\"): \"\"[^\n]*\}\n)"
CHAT: dict[str, Any] = {"messages": messages("x"), "stream": True, "max_tokens": 3, "temperature": 0}
LINES: dict[str, Any] = {"model": "tiny", "options": {"num_predict": 3, "temperature": 0}}

STREAMS: dict[str, tuple[dict[str, Any], bytes, bytes]] = {
    # address: body, what begins the stream, what it says while there is no news
    "/v1/chat/completions": (CHAT, rb'data: \{[^\n]*"delta": \{"role": "assistant"[^\n]*\n\n', _COMMENT),
    "/v1/completions": ({"prompt": "x", "stream": True, "max_tokens": 3, "temperature": 0}, _COMMENT, _COMMENT),
    "/v1/responses": (
        {"input": "x", "stream": True, "max_output_tokens": 3, "temperature": 0},
        rb"event: response.created\n.*?\n\nevent: response.in_progress\n[^\n]*\n\n",
        _COMMENT,
    ),
    "/v1/messages": (CHAT | {"model": "tiny"}, rb"event: message_start\n[^\n]*\n\n" + _PING, _PING),
    "/api/chat": (LINES | {"messages": messages("x")}, b"", _EMPTY),
    "/api/generate": (LINES | {"prompt": "x"}, b"", _EMPTY),
}


@pytest.fixture(scope="module")
def hasty(chat_path: Path) -> Iterator[Running]:
    """A server of one request at once, whose streams say something every few milliseconds."""
    with started(chat_path, load_options={"n_ctx": 100_000}, n_queue=8, quiet_s=0.002) as running:
        yield running


@contextmanager
def busy(running: Running) -> Iterator[None]:
    """Let the only place be taken inside the block."""
    with running.client.stream("POST", "/v1/chat/completions", json=ENDLESS) as taken:
        assert taken.status_code == 200
        wait_until(lambda: running.queue.n_running == 1, "it does not run")
        yield
    wait_until(lambda: running.queue.n_running == 0, "it goes on")


def text_of(data: bytes) -> str:
    """Return the text of a stream of any interface, read as its clients do."""
    found = []
    for line in data.decode().splitlines():
        line = line.removeprefix("data: ")
        if line.startswith("{"):
            part = json.loads(line)
            choice = (part.get("choices") or [{}])[0]
            delta = part.get("delta") if part.get("type") != "content_block_delta" else part["delta"].get("text", "")
            if part.get("type") == "message_delta":
                delta = ""
            message = part.get("message", {}) if "done" in part else {}
            told = (choice.get("text"), choice.get("delta", {}).get("content"), delta, message.get("content"))
            found += [each for each in (*told, part.get("response") if "done" in part else "") if each]
    return "".join(found)


@pytest.mark.parametrize("path", STREAMS)
def test_a_stream_that_waits_says_so(hasty: Running, path: str) -> None:
    """Header and first event come while another request has the only place, then news of no news; the text is whole."""
    body, first, quiet = STREAMS[path]
    alone = text_of(hasty.client.post(path, json=body).content)
    with ExitStack() as stack:
        with busy(hasty):
            waiting = stack.enter_context(hasty.client.stream("POST", path, json=body))
            assert (waiting.status_code, hasty.queue.n_running, hasty.queue.n_waiting) == (200, 1, 1)
            assert waiting.headers["cache-control"] == "no-store, no-transform"
            assert waiting.headers["x-accel-buffering"] == "no"
            pieces, data = waiting.iter_raw(), b""
            while re.fullmatch(first + quiet + b"{3,}", data, re.DOTALL) is None:
                assert len(data) < 100_000, data[-1000:]
                data += next(pieces)
        assert text_of(data + b"".join(pieces)) == alone != ""


def test_a_prompt_that_is_read_for_long(hasty: Running) -> None:
    """Between the first event and the first token, while the prompt is read, comments come."""
    asked = {"prompt": [1, 2, 3, 4] * 1000, "stream": True, "max_tokens": 1, "reuse": "exact"}
    reply = hasty.client.post("/v1/completions", json=asked)
    assert re.match(_COMMENT + b"{3,}data: ", reply.content), reply.content[:500]


def _openais(url: str, path: str, asked: dict[str, Any]) -> str:
    """Return the text that openai's client takes from a stream."""
    with pytest.importorskip("openai").OpenAI(base_url=f"{url}/v1", api_key="-") as client:
        if path == "/v1/responses":
            return "".join(event.delta for event in client.responses.create(**asked) if "text.delta" in event.type)
        if path == "/v1/completions":
            return "".join(part.choices[0].text for part in client.completions.create(**asked))
        return "".join(part.choices[0].delta.content or "" for part in client.chat.completions.create(**asked))


def _anthropics(url: str, path: str, asked: dict[str, Any]) -> str:
    with pytest.importorskip("anthropic").Anthropic(base_url=url, api_key="-") as client:
        more = {"temperature": asked.pop("temperature")}  # which the library no longer names
        events = client.messages.create(**asked, extra_body=more)
        return "".join(event.delta.text for event in events if event.type == "content_block_delta")


def _ollamas(url: str, path: str, asked: dict[str, Any]) -> str:
    with closing(pytest.importorskip("ollama").Client(host=url)) as client:
        if path == "/api/generate":
            return "".join(part.response for part in client.generate(stream=True, **asked))
        return "".join(part.message.content for part in client.chat(stream=True, **asked))


def client_of(path: str) -> Callable[[str, str, dict[str, Any]], str]:
    """Return what reads an interface's stream as its own library does."""
    return _ollamas if path.startswith("/api") else _anthropics if path == "/v1/messages" else _openais


@pytest.mark.parametrize("path", STREAMS)
def test_the_libraries_pass_over_what_is_no_news(hasty: Running, path: str) -> None:
    """Each interface's own client has the text of the model alone, whatever came while it waited."""
    body, first, quiet = STREAMS[path]
    alone = text_of(hasty.client.post(path, json=body).content)
    with ThreadPoolExecutor() as pool:
        with busy(hasty):
            text = pool.submit(client_of(path), hasty.url, path, body | {"model": "tiny"})
            wait_until(lambda: hasty.queue.n_waiting == 1 or text.done(), "it does not wait")
            with hasty.client.stream("POST", path, json=body) as beside:  # which waits for as long
                pieces, data = beside.iter_raw(), b""
                while re.fullmatch(first + quiet + b"{3,}", data, re.DOTALL) is None:
                    data += next(pieces)
        assert text.result(PATIENCE_S) == alone != ""


@pytest.mark.parametrize("path", STREAMS)
def test_a_client_that_goes_away_is_told_no_more(hasty: Running, path: str) -> None:
    """When the client of a stream that waits hangs up, the request leaves the queue."""
    with busy(hasty):
        with hasty.client.stream("POST", path, json=STREAMS[path][0]) as waiting:
            pieces = waiting.iter_raw()  # dropping these closes the stream
            next(pieces)
            assert hasty.queue.n_waiting == 1
        wait_until(lambda: hasty.queue.n_waiting == 0, "it still waits")
        assert hasty.queue.n_running == 1


@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", r'data: \{"error": .*"code": "timeout"\}\}\n\n'),
        ("/v1/completions", r'data: \{"error": .*"code": "timeout"\}\}\n\n'),
        ("/v1/responses", r'event: error\ndata: .*"code": "timeout".*\n\nevent: response.failed\ndata: .*\n\n'),
        ("/v1/messages", r'event: error\ndata: .*"type": "timeout_error".*\n\n'),
        ("/api/chat", r'\{"error": "the request took longer .*"\}\n'),
        ("/api/generate", r'\{"error": "the request took longer .*"\}\n'),
    ],
)
def test_what_fails_later_ends_the_stream(hasty: Running, path: str, last: str) -> None:
    """A request whose time is over while it waits has its header already: the error is the stream's last event."""
    with busy(hasty):
        settings = hasty.service.settings
        hasty.service.settings = replace(settings, timeout_s=0.05)
        try:
            ended = hasty.client.post(path, json=STREAMS[path][0])
        finally:
            hasty.service.settings = settings
    assert ended.status_code == 200
    assert re.search(f"{last}$", ended.text), ended.text[-500:]


REGEX = {"response_format": {"type": "regex", "pattern": "a|("}}
SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nothing"}}}}


@pytest.mark.parametrize(
    ("path", "fields", "words"),
    [
        ("/v1/chat/completions", {"messages": messages("x " * 600)}, "leaves room for"),
        ("/v1/chat/completions", REGEX, "regular expression"),
        ("/v1/chat/completions", REGEX | {"n": 2}, "regular expression"),
        ("/v1/chat/completions", SCHEMA, "schema"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object"}, "ignore_end": True}, "ignore_end"),
        ("/v1/chat/completions", {"temperature": -1}, "temperature"),
        ("/v1/completions", {"prompt": [1] * 600}, "leaves room for"),
        ("/v1/completions", {"prompt": [[1], [1] * 600]}, "leaves room for"),
        ("/v1/completions", {"prompt": [[1], [1] * 600], **REGEX}, "leaves room for"),
        ("/v1/responses", {"input": "x " * 600}, "leaves room for"),
        ("/v1/messages", {"messages": messages("x " * 600)}, "leaves room for"),
        ("/api/chat", {"messages": messages("x " * 600)}, "leaves room for"),
        ("/api/chat", {"format": {"type": "nothing"}}, "schema"),
        ("/api/generate", {"prompt": "x", "format": {"type": "nothing"}}, "schema"),
    ],
)
def test_what_can_be_refused_has_its_status(server: Running, path: str, fields: dict[str, Any], words: str) -> None:
    """A stream that can't be: too long, a grammar that does not compile, options that exclude each other: a 400."""
    refused = server.client.post(path, json=STREAMS[path][0] | fields)
    assert (refused.status_code, words in refused.text) == (400, True), refused.text


def test_what_is_refused_while_others_run(hasty: Running) -> None:
    """What needs no memory to be checked is refused before its turn; a grammar is compiled, or refused, in its turn."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        answers.append(hasty.client.post("/v1/chat/completions", json=CHAT | REGEX))

    asking = threading.Thread(target=ask)
    with busy(hasty):
        asking.start()
        wait_until(lambda: hasty.queue.n_waiting == 1, "it does not wait")
        long = hasty.client.post("/v1/completions", json={"prompt": [1] * 100_001, "stream": True})
        assert (long.status_code, hasty.queue.n_running) == (400, 1)
    asking.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [400]
