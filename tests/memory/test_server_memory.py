"""A server keeps to its cap whatever it is sent, and does not shed drafts for what a request's text took."""

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import PATIENCE_S, finish, start
from support.processes.running_server import CHAT

MB = 1_000_000
CAP_MB = 280
NARROW_MB = 180
VOCABULARY, LARGE_VOCABULARY_MB = 150_000, 230
ASKED = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 24, "temperature": 0}

OPTIONS = ("-c", "1024", "--parallel", "2", "--runtime", "cpu", "--port", "0")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="the system's count of memory")]


@contextmanager
def serving(
    *given: Path | str, cap_mb: int = CAP_MB, env: Mapping[str, str] | None = None
) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Start `edgedec serve` under the cap and wait until it is ready."""
    child = start("serve", *given, *OPTIONS, "--memory", f"{cap_mb}MB", env=env)
    try:
        assert child.stderr is not None
        for line in iter(child.stderr.readline, b""):
            if match := re.search(rb"is ready at (http://\S+)", line):
                yield match[1].decode(), child
                break
        else:
            raise AssertionError(finish(child))
    finally:
        child.terminate()
        finish(child)


def held_mb(child: "subprocess.Popen[bytes]", name: str) -> float:
    """Return what the system counts for a process, in MB."""
    found = re.search(rf"{name}:\s+([0-9]+) kB", Path(f"/proc/{child.pid}/status").read_text(encoding="utf-8"))
    assert found is not None
    return int(found[1]) * 1024 / MB


def with_models(folder: Path, *names: str, **shape: Any) -> dict[str, str]:
    """Write tiny models of these names; return the environment in which a server finds them."""
    (folder / "models").mkdir(exist_ok=True)
    for seed, name in enumerate(names):
        path = folder / "models" / f"{name}.gguf"
        tiny_llama(path, seed=seed, n_ctx_train=1024, dtype="f16", chat_template=CHAT, **shape)
    return dict.fromkeys(("EDGEDEC_CACHE", "EDGEDEC_CONFIG"), str(folder))


def answer_of(client: httpx.Client, name: str) -> str:
    """Return what a model answers to ASKED."""
    reply = client.post("/v1/chat/completions", json=ASKED | {"model": name})
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["message"]["content"]
    return text


def bodies() -> Iterator[tuple[str, bytes]]:
    """Yield requests that took hundreds of MB: an address and a body each."""
    chat, completion = "/v1/chat/completions", "/v1/completions"
    for n in (2_000, 10_000, 270_000):
        yield chat, b'{"messages":[' + b",".join([b'{"role":"user","content":""}'] * n) + b"]}"
    for n in (30_000, 150_000, 900_000):
        yield completion, b'{"prompt":"' + b"a b c d " * n + b'"}'
        yield chat, json.dumps({"messages": [{"role": "user", "content": "a b c d " * n}]}).encode()
    for n in (5_000, 100_000, 2_600_000):
        yield completion, '{{"prompt":"{}"}}'.format("中" * n).encode()
    yield chat, b'{"messages":[' + b",".join([b"{}"] * 2_600_000) + b"]}"


@pytest.mark.model
def test_a_server_keeps_to_its_cap_whatever_it_is_sent(smollm_path: Path) -> None:
    """Long prompts, many messages and unfinished bodies are refused within the cap, and drafts are as they were."""
    named = ("--draft", "suffix")  # what is named is asked before each step, also where it brings little
    with serving(smollm_path, *named) as (url, child), httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        first = client.post("/v1/chat/completions", json=ASKED).json()
        for path, body in bodies():
            reply = client.post(path, content=body)
            assert reply.json()["error"]["code"] in ("context_length_exceeded", "too_large"), body[:60]
        host, port = url.removeprefix("http://").split(":")
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 7900000\r\n\r\n"
        with ExitStack() as connections:
            for _ in range(40):
                connection = connections.enter_context(socket.create_connection((host, int(port)), PATIENCE_S))
                connection.sendall(head)
                connection.settimeout(0.05)
                with suppress(TimeoutError, ConnectionError):
                    connection.sendall(b" " * 7_800_000)
            last = client.post("/v1/chat/completions", json=ASKED).json()
        assert held_mb(child, "VmHWM") <= CAP_MB
    assert last["choices"][0]["message"] == first["choices"][0]["message"]
    told = last["edgedec"]["generations"][0]
    assert not [reason for reason in told["reasons"] if "shed" in reason]
    assert told["drafters"].keys() == first["edgedec"]["generations"][0]["drafters"].keys() != set()


def test_twenty_requests_over_three_models_keep_the_cap(tmp_path: Path) -> None:
    """Of three models of 41 MB only one fits under the cap: all are answered, and the process never holds more."""
    names = ("ape", "bee", "cow")
    env = with_models(tmp_path, *names, n_embd=512, n_head=8, n_ff=6144)
    with (
        serving("--draft", "off", cap_mb=NARROW_MB, env=env) as (url, child),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(9) as pool,
    ):

        def look() -> set[int]:
            return {len(client.get("/api/ps").json()["models"]) for _ in range(20)}

        without = held_mb(child, "VmRSS")
        ask = partial(answer_of, client)
        alone = {name: ask(name) for name in names}
        assert without + 2 * 41 < NARROW_MB < without + 3 * 41  # so the cap says something
        asked = [names[i * 7 % 3] for i in range(20)]
        counts = pool.submit(look)
        assert list(pool.map(ask, asked)) == [alone[name] for name in asked]
        assert counts.result() <= {0, 1}
        assert held_mb(child, "VmHWM") <= NARROW_MB


def test_six_requests_at_once_for_four_models_keep_the_cap(tmp_path: Path) -> None:
    """Models with large vocabularies come and go twice: every request is answered, and the cap is kept."""
    names = ("ape", "bee", "cow", "dog")
    env = with_models(tmp_path, *names, n_embd=64, n_vocab=VOCABULARY)
    with (
        serving("--draft", "off", cap_mb=LARGE_VOCABULARY_MB, env=env) as (url, child),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
        ThreadPoolExecutor(6) as pool,
    ):
        ask = partial(answer_of, client)
        alone = {name: ask(name) for name in names}
        asked = [*names, *names[:2]]
        assert list(pool.map(ask, asked)) == [alone[name] for name in asked]
        assert held_mb(child, "VmHWM") <= LARGE_VOCABULARY_MB


def test_a_server_keeps_its_model_under_its_least_cap(tmp_path: Path) -> None:
    """What grammars, unloading and another model's visit leave behind is in the first plan, so the model comes back."""
    env = with_models(tmp_path, "ape", n_vocab=50_000) | with_models(tmp_path, "bee", n_vocab=5_000)
    refusal = finish(start("serve", "ape", *OPTIONS, "--memory", "40MB", env=env)).err
    needed = re.search(r"needs ([0-9.]+) MB at the least", refusal)
    assert needed is not None, refusal
    cap_mb = round(float(needed[1]) / 0.98) + 1  # what is kept free grows with the cap
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}
    asked = {"model": "ape", "prompt": "Hello", "max_tokens": 4}
    with (
        serving("ape", cap_mb=cap_mb, env=env) as (url, child),
        httpx.Client(base_url=url, timeout=PATIENCE_S) as client,
    ):
        for changes in (
            {"response_format": {"type": "regex", "pattern": "[a-z ]+"}},
            {"response_format": schema},
            {"response_format": {"type": "regex", "pattern": "[0-9]+"}, "n": 2},
            {"model": "bee"},
            {"model": "bee", "response_format": schema},
            {},
        ):
            reply = client.post("/v1/completions", json=asked | changes)
            assert reply.status_code == 200, (changes, reply.text)
            client.post("/api/generate", json={"model": "ape", "keep_alive": 0, "stream": False})
            reply = client.post("/v1/completions", json=asked)
            assert reply.status_code == 200, (changes, reply.text)
            client.post("/api/generate", json={"model": "ape", "keep_alive": 0, "stream": False})
        assert held_mb(child, "VmHWM") <= cap_mb
