"""From the start of a server to its end: loading, failing, signals."""

import os
import re
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import pytest
from support.processes.command_line import finish, run_here, start
from support.processes.running_server import ENDLESS, PATIENCE_S, started, wait_until

from edgedec.errors import EdgedecError, ModelFormatError
from edgedec.progress import CancelToken
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry.models import Prepared, Recipe
from edgedec_apps.server.serving import address_of, open_socket, serve

QUICK = ("--port", "0", "--runtime", "cpu", "--draft", "off", "-c", "100000", "-v")


@pytest.mark.slow
def test_requests_wait_for_the_first_model_and_are_told_why_it_failed() -> None:
    """While the model loads, health is 503 and requests wait; a failure to load ends them and the server, with it."""
    settings = Settings(("model.gguf",), port=0)
    listener = open_socket(settings)
    url, go = address_of(listener), threading.Event()
    errors: list[EdgedecError] = []

    def prepare(_recipe: Recipe, _n_ctx: int | None, _cancel: CancelToken) -> Prepared:
        assert go.wait(PATIENCE_S)
        raise ModelFormatError("it is damaged")

    def run() -> None:
        try:
            serve(settings, listener, prepare, CancelToken(), lambda _: None)
        except EdgedecError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
            health = client.get("/health")
            models, tags = client.get("/v1/models"), client.get("/api/tags")
            page = client.get("/")
            with ThreadPoolExecutor() as pool:
                asked = {"messages": [{"role": "user", "content": "x"}]}
                chat = pool.submit(client.post, "/v1/chat/completions", json=asked)
                ollama = pool.submit(client.post, "/api/chat", json={"model": "model"})
                done, _ = wait([chat, ollama], timeout=0.3)
                go.set()
    finally:
        go.set()
        thread.join(PATIENCE_S)
    assert (health.status_code, health.json()["error"]["code"]) == (503, "loading")
    assert health.headers["retry-after"] == "2"
    assert not done, "they wait"
    told = "the model could not be loaded: it is damaged"
    assert (chat.result().status_code, chat.result().json()["error"]["code"]) == (503, "model_failed")
    assert chat.result().json()["error"]["message"] == told
    assert (ollama.result().status_code, ollama.result().json()) == (503, {"error": told})
    assert models.json()["data"][0]["ready"] is False
    assert tags.json() == {"models": []}
    assert page.status_code == 200
    assert [str(error) for error in errors] == ["it is damaged"]


def test_a_port_in_use(chat_path: Path) -> None:
    """A port that somebody listens on is refused before anything is loaded."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        run_here("serve", "no-such-model", "--port", str(port)).failed(40, f"port {port}", "in use")


def test_a_model_that_is_not_there() -> None:
    """The command ends with the error of loading, as run does."""
    run_here("serve", "no-such-model", "--port", "0", "-q").failed(11, "no model is called 'no-such-model'")


def test_beyond_loopback_a_key_is_asked_for() -> None:
    """--host 0.0.0.0 without a key or --no-auth is refused."""
    run_here("serve", "no-such-model", "--host", "0.0.0.0").failed(40, "--api-key", "--no-auth")


@pytest.mark.slow
def test_a_server_ends_while_texts_are_generated(chat_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """When a server ends, running streams and half-sent bodies end with an error, and nothing is left running."""
    parts: list[str] = []
    before = set(threading.enumerate())  # those of engines that other tests of this process keep open
    with started(chat_path, load_options={"n_ctx": 100_000}) as running:
        first = threading.Event()

        def read() -> None:
            with httpx.stream("POST", f"{running.url}/v1/chat/completions", json=ENDLESS, timeout=PATIENCE_S) as stream:
                for line in stream.iter_lines():
                    parts.append(line)
                    first.set()

        reader = threading.Thread(target=read)
        reader.start()
        assert first.wait(PATIENCE_S)
        half = running.posting(b"{", 100)
        wait_until(lambda: running.service.memory.n_taken >= 400, "the body is not read")
    reader.join(PATIENCE_S)
    with half:
        assert half.recv(65536).startswith(b"HTTP/1.1 503 ")
    assert '"code": "shutting_down"' in "".join(parts[-3:])
    assert "ERROR" not in caplog.text
    wait_until(lambda: not our_threads() - before, "threads go on")


def our_threads() -> set[threading.Thread]:
    """Return the threads of this process that edgedec started."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("edgedec-")}


def address(child: "subprocess.Popen[bytes]") -> str:
    """Return the address of `edgedec serve` once it is ready."""
    assert child.stderr is not None
    for line in iter(child.stderr.readline, b""):
        if match := re.search(rb"is ready at (http://\S+)", line):
            return match[1].decode()
    raise AssertionError(finish(child))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_signals_end_the_command(chat_path: Path) -> None:
    """SIGTERM ends `edgedec serve` with 0 and Ctrl-C with 130, in the middle of a stream, without a traceback.

    With --verbose the request is shown, and nothing of its text.
    """
    codes = {signal.SIGTERM: 0, signal.SIGINT: 130}
    children = {number: start("serve", chat_path, *QUICK) for number in codes}
    try:
        for number, child in children.items():
            url = f"{address(child)}/v1/chat/completions"
            with httpx.stream("POST", url, json=ENDLESS, timeout=PATIENCE_S) as stream:
                lines = stream.iter_lines()
                next(lines)
                child.send_signal(number)
                rest = "".join(lines)
            result = finish(child)
            assert (result.code, result.out) == (codes[number], b"")
            assert "shutting_down" in rest
            assert "Traceback" not in result.err
            assert "edgedec.server: POST /v1/chat/completions 200 " in result.err
            assert ENDLESS["messages"][0]["content"] not in result.err
    finally:
        for child in children.values():
            if child.poll() is None:
                child.kill()
                child.communicate()


@pytest.mark.slow
def test_a_server_that_is_killed_loses_no_file(chat_path: Path, tmp_path: Path) -> None:
    """After kill -9 in the middle of a text the files are as they were, and the next start gives the same text."""
    store = tmp_path / "drafts"
    flags = ("--port", "0", "--runtime", "cpu", "-c", "100000", "--draft", "suffix", "--draft-option", f"store={store}")
    asked = {"messages": ENDLESS["messages"], "max_tokens": 40, "temperature": 0, "ignore_end": True}
    texts: list[str] = []
    for end in ("in order", "killed", "in order"):
        saved = store.read_bytes() if texts else b""
        child = start("serve", chat_path, *flags, env={"EDGEDEC_CACHE": str(tmp_path / "cache")})
        try:
            url = f"{address(child)}/v1/chat/completions"
            texts.append(httpx.post(url, json=asked, timeout=PATIENCE_S).json()["choices"][0]["message"]["content"])
            if end == "in order":
                child.terminate()
                assert finish(child).code == 0
                continue
            with httpx.stream("POST", url, json=ENDLESS, timeout=PATIENCE_S) as stream:
                lines = stream.iter_lines()
                next(lines)
                child.kill()
                with pytest.raises(httpx.TransportError):
                    list(lines)
            finish(child)
            assert store.read_bytes() == saved != b""
            assert sorted(tmp_path.rglob("*.partial")) == []
        finally:
            if child.poll() is None:
                child.kill()
                child.communicate()
    assert texts == [texts[0]] * 3
