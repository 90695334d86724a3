"""Presets, copies and deleted models, with ollama's own client; and the commands ps, stop, create, list and rm."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import run_here
from support.processes.running_server import CHAT, Running, messages, started
from support.processes.servers import StubServer, catalogue_of

from edgedec_apps.server.core.fields import IGNORED_HEADER

pytestmark = pytest.mark.slow


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with one tiny model, which is the configuration's folder, too."""
    (tmp_path / "models").mkdir()
    tiny_llama(tmp_path / "models" / "ape.gguf", n_layer=1, n_ctx_train=2048, chat_template=CHAT)
    for name in ("EDGEDEC_CACHE", "EDGEDEC_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("EDGEDEC_MODELS", raising=False)
    return tmp_path


@pytest.fixture
def running(home: Path) -> Iterator[Running]:
    """A server of that cache, without models at the start."""
    with started() as running:
        yield running


@pytest.fixture
def client(running: Running) -> Iterator[Any]:
    """ollama's client, pointed at the server."""
    client = pytest.importorskip("ollama").Client(host=running.url, timeout=60)
    yield client
    client.close()


def test_a_preset_answers_as_it_was_made(client: Any, running: Running, home: Path) -> None:
    """Its system message and options count where the request has none; it shares the engine of its model."""
    client.create("poet", from_="ape", system="Rhyme.", parameters={"num_predict": 5, "temperature": 0, "stop": ["~"]})
    file = home / "presets" / "poet.toml"
    if os.name == "posix":
        assert file.stat().st_mode & 0o777 == 0o600
    answer = client.chat("poet", messages("Hello"))
    engine = running.engine_of("ape")
    told = [{"role": "system", "content": "Rhyme."}, *messages("Hello")]
    assert answer.model == "poet"
    assert answer.message.content == engine.chat(told, max_tokens=5, temperature=0).text
    assert len(running.service.registry.loaded) == 1
    other = [{"role": "system", "content": "Be dull."}, *messages("Hello")]
    asked = client.chat("poet", other, options={"num_predict": 3})
    assert asked.message.content == engine.chat(other, max_tokens=3, temperature=0).text
    assert client.generate("poet", "Hello").response == answer.message.content
    listed = {model.model: model.details.parent_model for model in client.list().models}
    assert listed == {"ape": "", "poet": "ape"}
    shown = client.show("poet")
    assert "num_predict" in shown.parameters
    assert [model.model for model in client.ps().models] == ["ape"]


def test_a_preset_on_the_command_line(home: Path) -> None:
    """A server can be started with a preset; its model is the same engine."""
    assert run_here("create", "poet", "ape", "--system", "Rhyme.", "--option", "n_ctx=1024").code == 0
    with started(Path("poet"), Path("ape")) as running:
        assert running.loaded == ["ape"]
        asked = {"messages": messages("Hello"), "max_tokens": 4, "temperature": 0}
        reply = running.client.post("/v1/chat/completions", json=asked).json()
        told = [{"role": "system", "content": "Rhyme."}, *messages("Hello")]
        text = running.engine.chat(told, max_tokens=4, temperature=0).text
        assert (reply["model"], reply["choices"][0]["message"]["content"]) == ("poet", text)
        running.client.post("/v1/chat/completions", json=asked | {"model": "ape"}).raise_for_status()
        assert (running.loaded, running.engine.n_ctx) == (["ape"], 1024)


def test_copies_and_templates(client: Any, running: Running) -> None:
    """A copy keeps everything; a template of its own needs an engine of its own, and must be sound."""
    client.create("plain", from_="ape", template="{{ messages[-1].content }}", parameters={"num_ctx": 1024})
    client.copy("plain", "other")
    options = {"num_predict": 4, "temperature": 0}
    text = client.chat("other", messages("Hello"), options=options).message.content
    engine = running.engine_of("other")
    assert engine is running.engine_of("plain")
    assert engine.n_ctx == 1024
    assert text == engine.generate("Hello", max_tokens=4, temperature=0).text
    client.chat("ape", messages("Hello"), options=options)
    assert len(running.service.registry.loaded) == 2
    refused: list[tuple[dict[str, Any], str]] = [
        ({"model": "x", "from_": "ape", "template": "{% if %}"}, "template"),
        ({"model": "x", "from_": "dog"}, "there is no model 'dog' here"),
        ({"model": "ape", "from_": "ape"}, "'ape' is the name of a model"),
        ({"model": "../x", "from_": "ape"}, "is no name for a preset"),
        ({"model": "x", "from_": "ape", "quantize": "q4_0"}, "quantize is 'q4_0', which is not supported"),
    ]
    for given, words in refused:
        with pytest.raises(pytest.importorskip("ollama").ResponseError, match=words):
            client.create(**given)
    assert {model.model for model in client.list().models} == {"ape", "plain", "other"}
    made = {"model": "typo", "from": "ape", "parameters": {"tempreature": 1}, "stream": False}
    assert running.client.post("/api/create", json=made).headers[IGNORED_HEADER] == "parameters.tempreature"


def test_deleting(client: Any, running: Running, home: Path) -> None:
    """A preset leaves its model; a model is unloaded and its file is gone; what is not there is a 404."""
    client.copy("ape", "monkey")
    client.chat("monkey", messages("x"), options={"num_predict": 1})
    client.delete("monkey")
    assert [model.model for model in client.list().models] == ["ape"]
    assert len(running.service.registry.loaded) == 1
    client.delete("ape:latest")
    assert running.service.registry.loaded == []
    assert not (home / "models" / "ape.gguf").exists()
    with pytest.raises(pytest.importorskip("ollama").ResponseError) as caught:
        client.delete("ape")
    assert caught.value.status_code == 404


def test_the_model_of_the_command_line_is_not_deleted(home: Path) -> None:
    """What the server was started with stays."""
    with started(home / "models" / "ape.gguf") as running:
        reply = running.client.request("DELETE", "/api/delete", json={"model": "ape"})
        assert (reply.status_code, "command line" in reply.json()["error"]) == (400, True)
        assert (home / "models" / "ape.gguf").exists()


def test_a_pulled_model_is_usable_at_once(client: Any, home: Path) -> None:
    """The next request after a pull can name the model."""
    data = tiny_llama(home / "new.gguf", seed=3, n_layer=1, chat_template=CHAT).read_bytes()
    with pytest.raises(pytest.importorskip("ollama").ResponseError, match="there is no model 'new' here"):
        client.chat("new", messages("x"))
    with StubServer() as stub:
        catalogue_of(stub, home, "new", data)
        assert [part.status for part in client.pull("new", stream=True)][-1] == "success"
    assert client.chat("new", messages("x"), options={"num_predict": 2}).eval_count == 2


def test_the_commands(running: Running, home: Path) -> None:
    """create, ps, stop, list and rm do on the command line what the server's addresses do."""
    made = run_here("create", "poet", "ape", "--system", "Rhyme.", "--option", "temperature=0")
    assert (made.code, "poet.toml" in made.err) == (0, True)
    at = ("--server", running.url)
    assert run_here("ps", *at).text == "no model is loaded\n"
    asked = {"model": "poet", "messages": messages("x"), "max_tokens": 1}
    assert running.client.post("/v1/chat/completions", json=asked).status_code == 200
    head, row, _, *legend = run_here("ps", *at).text.splitlines()
    assert " ".join(legend).startswith("memory: the most that the model may hold beside the server itself, with full")
    assert head.split() == ["NAME", "MEMORY", "CONTEXT", "REQUESTS", "UNTIL"]
    assert (row.split()[0], row.split()[3:5]) == ("ape", ["512", "0"])
    (model,) = json.loads(run_here("ps", *at, "--json").text)["models"]
    assert (model["name"], model["context_length"]) == ("ape", 512)
    assert run_here("stop", "poet", *at).err == "edgedec: poet is unloaded\n"
    assert running.service.registry.loaded == []
    run_here("stop", "dog", *at).failed(11, "there is no model 'dog' here")
    listed = run_here("list").text
    assert (listed.splitlines()[0], "poet" in listed) == ("on this machine:", True)
    told = ("run", "ape", "Hello", "--system", "Rhyme.", "-t", "0")
    flags = ("-n", "5", "-q", "--runtime", "cpu", "--draft", "off")
    assert run_here("run", "poet", "Hello", *flags).text == run_here(*told, *flags).text
    assert run_here("chat", "poet", *flags, stdin=b"Hello\n").text == run_here(*told, *flags).text
    assert run_here("rm", "poet").code == 0
    assert "poet" not in run_here("list").text
    run_here("create", "poet", "dog").failed(11, "no model is called 'dog'")
    run_here("create", "poet", "ape", "--option", "temperature=hot").failed(40, "temperature is 'hot'")


def test_no_server_runs(running: Running) -> None:
    """Where nothing answers, ps and stop say so and how a server is started; so for what is no edgedec."""
    for words in (("ps",), ("stop", "ape")):
        for at in (("--server", "127.0.0.1:9"), ("--port", "9")):
            run_here(*words, *at).failed(40, "no server answers at http://127.0.0.1:9 ", "serve")
        run_here(*words, "--port", "9", "--server", "there").failed(40, "--port and --server are given")
    with StubServer() as stub:
        stub.add("/api/ps", b"hello")
        run_here("ps", "--server", stub.root).failed(40, "no edgedec server")


def test_a_key_is_asked_for(home: Path) -> None:
    """Who has no key can neither create nor delete, list nor stop; nor can the page of another site."""
    with started() as running:
        for method, path in (("POST", "/api/create"), ("DELETE", "/api/delete"), ("POST", "/api/pull")):
            other = {"origin": "https://evil.example"}
            assert running.client.request(method, path, json={"model": "ape"}, headers=other).status_code == 403
    with started(api_key="secret") as running:
        for method, path in (("POST", "/api/create"), ("DELETE", "/api/delete"), ("POST", "/api/copy")):
            reply = running.client.request(method, path, json={"model": "x"}, headers={"authorization": ""})
            assert reply.status_code == 401
        run_here("ps", "--server", running.url).failed(1, "API key is missing")
        assert run_here("ps", "--server", running.url, "--api-key", "secret").code == 0
