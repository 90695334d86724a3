"""A server whose model lies on other machines, one of which is lost: errors in each form, and streams that go on."""

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Timer
from typing import Any

import pytest
from support.processes.rpc_servers import RpcServer, rpc_servers
from support.processes.running_server import Running, messages, started

pytestmark = pytest.mark.slow

CHAT: dict[str, Any] = {"messages": messages("Tell me a story."), "max_tokens": 60, "temperature": 0.0, "seed": 1}


@pytest.fixture(scope="module")
def machine() -> Iterator[RpcServer]:
    with rpc_servers(1) as machines:
        yield machines[0]


def _serving(machine: RpcServer, path: Path, wait_s: float) -> Any:
    options = {"rpc": machine.address, "rpc_wait": wait_s, "repack": False}
    return started(path, load_options={"runtime": "llamacpp", "runtime_options": options, "n_threads": 1})


def _text(running: Running) -> str:
    reply = running.client.post("/v1/chat/completions", json=CHAT)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def test_errors_have_the_form_of_each_interface(machine: RpcServer, smollm_path: Path) -> None:
    """Before anything is sent it is 503 with a time to try again; within a stream it is its last event.

    The next request loads the model again.
    """
    with _serving(machine, smollm_path, 0.0) as running:
        text, client = _text(running), running.client
        machine.kill()
        openai = client.post("/v1/chat/completions", json=CHAT)
        anthropic = client.post("/v1/messages", json={**CHAT, "model": smollm_path.stem})
        ollama = client.post("/api/chat", json={"messages": CHAT["messages"], "model": smollm_path.stem})
        machine.start()
        assert [reply.status_code for reply in (openai, anthropic, ollama)] == [503, 503, 503]
        assert openai.json()["error"]["code"] == "model_lost"
        assert openai.headers["retry-after"] == "10"
        assert machine.address in openai.json()["error"]["message"]
        assert anthropic.json()["error"]["type"] == "overloaded_error"
        assert machine.address in ollama.json()["error"]
        assert _text(running) == text
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            events = _events(stream.iter_lines(), machine, restart_s=None)
        machine.start()
        assert events[-1]["error"]["code"] == "model_lost"
        begun = _joined(events[:-1])
        assert begun
        assert text.startswith(begun)
        assert _text(running) == text


def test_a_stream_waits_and_goes_on(machine: RpcServer, smollm_path: Path) -> None:
    """With a time to wait, the stream of a lost machine brings the same text."""
    with _serving(machine, smollm_path, 60.0) as running:
        text, client = _text(running), running.client
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as stream:
            events = _events(stream.iter_lines(), machine, restart_s=1.0)
        assert _joined(events) == text
        assert events[-1]["choices"][0]["finish_reason"] == "length"


def _events(lines: Iterator[str], machine: RpcServer, restart_s: float | None) -> list[dict[str, Any]]:
    """Return the events of a stream whose machine is killed after the fifth one, and started again if wanted."""
    found: list[dict[str, Any]] = []
    starting = None
    for line in lines:
        if line.startswith("data: {"):
            found.append(json.loads(line.removeprefix("data: ")))
            if len(found) == 5:
                machine.kill()
                if restart_s is not None:
                    starting = Timer(restart_s, machine.start)
                    starting.start()
    if starting is not None:
        starting.join()
    return found


def _joined(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)
