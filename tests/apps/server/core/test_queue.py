"""The queue, time limits and clients that go away."""

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.processes.running_server import (
    ENDLESS,
    PATIENCE_S,
    Running,
    messages,
    metric,
    started,
    wait_until,
)

from edgedec.progress import CancelToken
from edgedec_apps.server.core.budget import MEMORY, Budget, MemoryBudget, RequestMemory, RequestQueue
from edgedec_apps.server.core.errors import ApiError
from edgedec_apps.server.core.fields import Fields
from edgedec_apps.server.core.generation import TextRequest, run_in_thread
from edgedec_apps.server.core.reply import Delivery, written
from edgedec_apps.server.core.service import Service
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.openai.api import ChatForm
from edgedec_apps.server.registry.models import Prepared


def begun(stream: httpx.Response) -> Iterator[str]:
    """Wait for the first text of a stream and return the lines that follow; dropping these closes the stream."""
    lines = stream.iter_lines()
    next(line for line in lines if '"content": "' in line and '"content": ""' not in line)
    return lines


def test_slots_are_passed_on_in_order() -> None:
    """Places go to those who wait in the order in which they came; who gives up waiting is passed over."""

    async def scene() -> list[str]:
        queue, order, gates = RequestQueue(1, 3), list[str](), {name: asyncio.Event() for name in "abcd"}

        async def request(name: str) -> None:
            async with queue.turn():
                order.append(name)
                await gates[name].wait()

        tasks = {name: asyncio.create_task(request(name)) for name in "abcd"}
        await asyncio.sleep(0)
        assert (queue.n_running, queue.n_waiting) == (1, 3)
        with pytest.raises(ApiError, match="1 request is running and 3 are waiting, ") as refused, queue.preparing():
            pass
        assert (refused.value.status, refused.value.retry_after_s) == (429, 4)
        tasks["b"].cancel()
        for name in "acd":
            gates[name].set()
        await asyncio.wait(tasks.values())
        assert (queue.n_running, queue.n_waiting) == (0, 0)
        return order

    assert asyncio.run(scene()) == ["a", "c", "d"]


@pytest.mark.parametrize("kind", [Budget, MemoryBudget])
def test_what_was_given_to_one_who_just_left_goes_on(kind: type[Budget]) -> None:
    """Nothing is given twice, and what a request gets in the moment in which it is cancelled goes to the next."""

    async def scene() -> None:
        budget = kind(1600)
        await budget.take(1400)
        tasks = [asyncio.create_task(budget.take(1000)) for _ in range(3)]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        budget.give(1400)
        assert (budget.n_taken, budget.n_waiting) == (1000, 2)  # before it knows
        tasks[0].cancel()
        await asyncio.wait(tasks[:1])
        assert (budget.n_taken, budget.n_waiting) == (1000, 1)
        await tasks[1]
        budget.give(1000)
        await tasks[2]
        assert (budget.n_taken, budget.n_waiting) == (1000, 0)

    asyncio.run(scene())


def test_a_model_has_as_many_places_as_sessions(server: Running) -> None:
    """Requests wait in the queue alone, not once more before the engine; as many may come as --parallel says."""
    assert server.queue.n_total == len(server.engine.pool.slots) == 3

    async def scene() -> None:
        queue = RequestQueue(3, 0)
        queue.load(1)
        tasks = [asyncio.create_task(queue.take(1)) for _ in range(3)]
        await asyncio.sleep(0)
        assert (queue.n_running, queue.n_waiting) == (1, 2)
        with pytest.raises(ApiError, match="--parallel 3"), queue.preparing():
            pass
        queue.load(8)
        await asyncio.wait(tasks)
        assert (queue.n_running, queue.n_total) == (3, 3)

    asyncio.run(scene())


def test_beyond_the_queue_a_request_is_refused(endless: Running) -> None:
    """One request runs, one waits, a third gets 429 and when to ask again; the one that waited is answered then."""
    answers: list[httpx.Response] = []

    def ask() -> None:
        asked = {"messages": messages("x"), "max_tokens": 2}
        answers.append(endless.client.post("/v1/chat/completions", json=asked))

    with endless.client.stream("POST", "/v1/chat/completions", json=ENDLESS) as running:
        lines = begun(running)
        waiting = threading.Thread(target=ask)
        waiting.start()
        wait_until(lambda: endless.queue.n_waiting == 1, "nobody waits")
        for path in ("/v1/chat/completions", "/api/chat"):
            refused = endless.client.post(path, json={"model": "tiny", "messages": messages("x")})
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
        assert metric(endless, "requests_waiting") == 1
        assert next(lines) == ""
    waiting.join(PATIENCE_S)
    assert [answer.status_code for answer in answers] == [200]


def test_a_client_that_goes_away_stops_its_text(endless: Running) -> None:
    """When the client of a stream hangs up, the generation ends within a few tokens and its place is free."""
    before = metric(endless, "generated_tokens_total")
    with endless.client.stream("POST", "/v1/chat/completions", json=ENDLESS) as running:
        assert next(begun(running)) == ""
    wait_until(lambda: endless.queue.n_running == 0, "the text goes on")
    assert metric(endless, "generated_tokens_total") - before < 50_000
    assert 'generations_total{finish_reason="cancelled"}' in endless.client.get("/metrics").text


def test_a_client_that_goes_away_before_the_answer(endless: Running) -> None:
    """The same for an answer in one piece, of which nothing was sent yet, and for a request that waits."""
    body = json.dumps(ENDLESS | {"stream": False}).encode()
    with endless.posting(body), endless.posting(body):
        queue = endless.queue
        wait_until(lambda: (queue.n_running, queue.n_waiting) == (1, 1), "nobody waits")
    wait_until(lambda: (queue.n_running, queue.n_waiting) == (0, 0), "it goes on")


class Panic(BaseException):
    """What a library may raise that is no Exception, as a panic of Rust code is."""


def test_a_failure_that_is_no_exception_ends_the_request() -> None:
    """It reaches who waits, as an error that names it: else the request, and its place, would be held for ever."""

    def fail(_tell: object) -> Iterator[Any]:
        raise Panic("deep inside")
        yield

    async def scene() -> None:
        await asyncio.wait_for(run_in_thread(fail, print, CancelToken()), PATIENCE_S)

    with pytest.raises(RuntimeError, match="deep inside"):
        asyncio.run(scene())


@pytest.mark.parametrize("logprobs", [False, True])
def test_a_slow_reader_keeps_no_place(server: Running, logprobs: bool) -> None:
    """A text is generated to its end even if the client reads nothing; the model stays only for log-probabilities."""
    delivery = Delivery(stream=True, logprobs=logprobs)
    texts = TextRequest((messages("x"),), {"max_tokens": 30, "ignore_end": True, "logprobs": 0 if logprobs else None})
    named = server.service.names.served[0]
    loaded = server.entry.loaded
    assert loaded is not None

    def prepare(*_given: Any) -> Prepared:
        return Prepared(True, 512, 512, lambda: loaded)

    async def scene() -> tuple[int, bytes]:
        service, reads, sent = Service(Settings(), prepare), asyncio.Event(), list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > 1:
                await reads.wait()

        async def receive() -> Any:
            await asyncio.Event().wait()

        scope = {"path": "/", MEMORY: RequestMemory(service.memory, PATIENCE_S)}
        reply = asyncio.create_task(
            written(service, named, Fields({}), lambda job: ChatForm(job, texts, delivery))(scope, receive, send)
        )
        entry = service.registry.entry(named.recipe)
        while len(sent) < 2 or entry.queue.n_running or entry.n_references > logprobs:
            await asyncio.sleep(0.01)
        assert entry.n_references == logprobs
        n_sent = len(sent)
        reads.set()
        await asyncio.wait_for(reply, PATIENCE_S)
        return n_sent, b"".join(message["body"] for message in sent[1:])

    n_sent, body = asyncio.run(scene())
    assert n_sent == 2
    assert body.count(b'"finish_reason": null') >= 2
    assert body.endswith(b"data: [DONE]\n\n")


@pytest.mark.slow
def test_a_request_ends_when_its_time_is_over(chat_path: Path) -> None:
    """Beyond --timeout an answer is a 504, and a stream ends with an error instead of a reason."""
    with started(chat_path, load_options={"n_ctx": 100_000}, timeout_s=0.3) as running:
        whole = running.client.post("/v1/chat/completions", json=ENDLESS | {"stream": False})
        running.service.settings = replace(running.service.settings, timeout_s=2.0)  # for a stream to begin in
        stream = running.client.post("/v1/chat/completions", json=ENDLESS)
        lines = running.client.post(
            "/api/chat", json={"model": "tiny", "messages": messages("x"), "options": {"seed": 1}}
        )
        wait_until(lambda: running.queue.n_running == 0, "it goes on")
    assert (whole.status_code, whole.json()["error"]["code"]) == (504, "timeout")
    assert stream.status_code == 200
    last = stream.text.strip().splitlines()[-1]
    assert '"code": "timeout"' in last
    assert 'finish_reason": "' not in stream.text
    assert lines.status_code == 200


@pytest.mark.slow
def test_a_body_that_does_not_come(chat_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A body that stops coming is a 408 after its time; a client that goes away in its middle is no error."""
    with started(chat_path, body_timeout_s=1.0) as running:
        with running.posting(b'{"messages":', 100) as connection:
            answer = connection.recv(65536)
        running.posting(b'{"messages":', 100).close()
        wait_until(lambda: ',status="400"} 1' in running.client.get("/metrics").text, "it is not noticed")
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
