"""edgedec launch: what each program is told, that it runs and ends with its server, and its file given back."""

import json
import os
import shlex
import signal
import socket
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.command_line import Terminal, finish, names, run_here, run_process, start
from support.processes.running_server import CHAT, Running, started

from edgedec_apps.launching import TOOLS, with_models

AGENT = """#!{python}
import json, os, signal, sys, time, urllib.request
url, model = os.environ["ANTHROPIC_BASE_URL"], os.environ["ANTHROPIC_MODEL"]
body = {{"model": model, "max_tokens": 2, "messages": [{{"role": "user", "content": "x"}}]}}
headers = {{"content-type": "application/json", "authorization": "Bearer " + os.environ["ANTHROPIC_AUTH_TOKEN"]}}
request = urllib.request.Request(url + "/v1/messages", json.dumps(body).encode(), headers)
status = urllib.request.urlopen(request).status
with open("{told}", "w") as file:
    json.dump([sys.argv[1:], status, model, url], file)
if sys.argv[-1] == "wait":
    def end(*_):
        time.sleep(1)  # in which a server that Ctrl-C reached would have ended
        print("mine", urllib.request.urlopen(url + "/health").status, flush=True)
        sys.exit(5)
    signal.signal(signal.SIGINT, end)
    print("waiting", flush=True)
    time.sleep(60)
sys.exit(7)
"""
OTHERS = 'name: mine\r\nmodels:\r\n\r\n# mine\r\n    - name: "a \xe9"\r\n      provider: x\r\nrules: []\r\n'.encode()
ALONE = ("--port", "9", "--model", "tiny", "--context", "4096")  # nothing listens there


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a chat template."""
    return tiny_llama(tmp_path_factory.mktemp("launch") / "tiny.gguf", chat_template=CHAT, n_ctx_train=2048)


@pytest.fixture(scope="module")
def running(path: Path) -> Iterator[Running]:
    """A server that runs."""
    with started(path, api_key="secret") as running:
        yield running


@pytest.fixture(autouse=True)
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file to which an agent writes what it was told; a home and a folder of programs, with that agent only."""
    for folder in ("home", "bin"):
        (tmp_path / folder).mkdir()
    agent, told = tmp_path / "bin" / "claude", tmp_path / "told.json"
    agent.write_text(AGENT.format(python=sys.executable, told=told))
    agent.chmod(0o755)
    monkeypatch.setenv("PATH", str(agent.parent))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return told


def config(tool: str, *more: str) -> tuple[dict[str, str], list[str], str]:
    """Return the variables, the command and the rest that --config prints, where no server runs."""
    lines = run_here("launch", tool, "--config", *ALONE, *more).text.splitlines()
    exports = [shlex.split(line)[1].partition("=") for line in lines if line.startswith("export ")]
    rest = lines[len(exports) :]
    command = shlex.split(rest.pop(0)) if TOOLS[tool].executable else []
    return {name: value for name, _, value in exports}, command, "\n".join(rest)


def test_what_terminals_are_told() -> None:
    """Each is told the server, the model and the context, in its own words; a person's words come last, and win."""
    variables, command, _ = config("claude", "--", "-p", "hi")
    assert command == ["claude", "--tools=Bash,Read,Edit,Write,Glob,Grep", "-p", "hi"]
    assert variables["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:9"
    assert (variables["ANTHROPIC_AUTH_TOKEN"], variables["ANTHROPIC_API_KEY"]) == ("none", "")
    assert {value for name, value in variables.items() if name.endswith("_MODEL")} == {"tiny"}
    assert config("claude", "--", "--tools", "Bash")[1] == ["claude", "--tools", "Bash"]
    variables, command, _ = config("codex", "--", "exec", "hi")
    assert (command[1::2][:-1], command[-2:]) == (["-c"] * (len(command) // 2 - 1), ["exec", "hi"])
    settings = tomllib.loads("\n".join(command[2:-2:2]))
    provider = settings["model_providers"][settings["model_provider"]]
    assert (settings["model"], settings["model_context_window"]) == ("tiny", 4096)
    assert (provider["base_url"], provider["wire_api"]) == ("http://127.0.0.1:9/v1", "responses")
    assert variables[provider["env_key"]] == "none"
    variables, command, _ = config("opencode")
    settings = json.loads(variables["OPENCODE_CONFIG_CONTENT"])
    (name, provider), *others = settings["provider"].items()
    assert (command, others, settings["model"]) == (["opencode"], [], f"{name}/tiny")
    assert provider["options"] == {"baseURL": "http://127.0.0.1:9/v1", "apiKey": "{env:EDGEDEC_API_KEY}"}
    assert provider["models"]["tiny"]["limit"]["context"] == 4096
    variables, command, _ = config("aider", "--", "a.py")
    assert variables == {"OPENAI_API_KEY": "none"}
    assert command[:3] == ["aider", "--openai-api-base=http://127.0.0.1:9/v1", "--model=openai/tiny"]
    assert command[-1] == "a.py"


def test_what_editors_are_told() -> None:
    """Zed's settings are JSON and Continue's entries YAML, which --config only prints; so does zed without it."""
    zed = json.loads(config("zed")[2])["language_models"]["ollama"]
    assert (zed["api_url"], zed["available_models"][0]["max_tokens"]) == ("http://127.0.0.1:9", 4096)
    assert run_here("launch", "zed", *ALONE).text.rstrip() == config("zed")[2]
    yaml = pytest.importorskip("yaml")
    chat, completion = yaml.safe_load(config("continue")[2])
    assert (chat["apiBase"], chat["model"]) == ("http://127.0.0.1:9/v1", "tiny")
    assert (completion["apiBase"], completion["roles"]) == ("http://127.0.0.1:9", ["autocomplete"])
    assert names(Path.home()) == []


def test_what_is_refused() -> None:
    """Other names, programs that are not installed, and no model; each says what to do."""
    run_here("launch", "claud", *ALONE).failed(40, "'claud' is not among claude, codex", "zed")
    run_here("launch", "codex", *ALONE).failed(40, "codex is not installed", "npm install -g @openai/codex")
    run_here("launch", "claude", "--port", "9").failed(40, "add --model NAME")
    run_here("launch", "claude", "--server", "127.0.0.1:9", "--model", "tiny").failed(40, "no server answers")
    assert run_here("launch", "claude", "--undo").err == "edgedec: no file of Claude Code is ever written\n"
    run_here("launch", "continue", "--undo").failed(40, "there is nothing to undo")


@pytest.mark.slow
def test_a_server_that_runs_is_used(running: Running, told: Path) -> None:
    """The agent gets its words, the key and the loaded model, and its exit code is the command's; no key is shown."""
    at = ("--server", running.url, "--api-key", "secret")
    result = run_here("launch", "claude", *at, "--", "-p", "hi")
    words, *rest = json.loads(told.read_text())
    assert (result.code, words[-2:], rest) == (7, ["-p", "hi"], [200, "tiny", running.url])
    assert "has a context of 512 tokens, which is little" in result.err
    assert "--context 8400" in result.err
    assert "secret" not in result.err + run_here("launch", "claude", "--config", *at).text
    run_here("launch", "claude", *at, "--context", "999999").failed(1, "the largest that fits")
    run_here("launch", "claude", *at, "--model", "nope").failed(11, "'nope'")
    run_here("launch", "claude", *at, "--memory", "1GB").failed(40, "--memory is for a server that is started")
    assert running.client.get("/health").status_code == 200


def free_port() -> int:
    """Return a port that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def is_silent(port: int) -> bool:
    """Return whether nothing listens at a port."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


@pytest.mark.slow
def test_a_server_that_was_started_ends_with_the_agent(path: Path, told: Path) -> None:
    """It loads the model, a path as well; one that can't start says why."""
    port = free_port()
    at = ("--port", str(port), "--model")
    result = run_process("launch", "claude", *at, str(path), "--context", "1024")
    assert (result.code, json.loads(told.read_text())[1:]) == (7, [200, "default", f"http://127.0.0.1:{port}"])
    assert "has a context of 1024 tokens" in result.err
    assert is_silent(port)
    run_process("launch", "claude", *at, "nope").failed(1, "no model is called 'nope'", "did not start (exit code 11)")


@pytest.mark.slow
def test_interrupts(path: Path) -> None:
    """Ctrl-C is the agent's own, SIGTERM ends it; either way the server ends, too."""
    port = free_port()
    words = ("launch", "claude", "--port", str(port), "--model", str(path), "--", "wait")
    with Terminal(*words) as person:
        person.expect("waiting")
        person.send("\x03", "mine 200")
        assert person.end() == 5
    assert is_silent(port)
    process = start(*words)
    assert process.stdout is not None
    assert process.stdout.readline() == b"waiting\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process).code == 143
    assert is_silent(port)


def settings_file(content: bytes | None) -> Path:
    """Return Continue's settings file, with this content."""
    file = Path.home() / ".continue" / "config.yaml"
    file.parent.mkdir(exist_ok=True)
    if content is not None:
        file.write_bytes(content)
        file.chmod(0o640)
        os.utime(file, (1, 1))
    return file


@pytest.mark.slow
@pytest.mark.parametrize("content", [None, b"", b"name: mine\n", OTHERS, b"\xff models\n"], ids=list("abcde"))
def test_a_file_is_given_back(running: Running, content: bytes | None) -> None:
    """Byte for byte, with its mode and time; it is written with --yes alone, and again with another context."""
    file = settings_file(content)
    launch = ("launch", "continue", "--server", running.url, "--api-key", "secret")
    run_here(*launch).failed(40, "+", "- name: edgedec", "nothing was written; add --yes")
    assert (file.read_bytes() if file.exists() else None) == content
    for _ in range(2):
        assert run_here(*launch, "--yes").code == 0
        assert file.read_bytes().count(b"- name: edgedec\n") == 1
        assert set((content or b"").splitlines()) <= set(file.read_bytes().splitlines())
    assert run_here(*launch).code == 0  # there is nothing to write
    assert run_here("launch", "continue", "--undo").code == 0
    assert names(file.parent) == ([] if content is None else ["config.yaml"])
    if content is not None:
        state = file.stat()
        assert (file.read_bytes(), state.st_mode & 0o777, state.st_mtime) == (content, 0o640, 1)
    run_here("launch", "continue", "--undo").failed(40, "there is nothing to undo")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "edit"),
    [(None, lambda data: data + b"#\n"), (OTHERS, lambda data: data + b"#\n"), (OTHERS, lambda data: data[99:])],
    ids=list("abc"),
)
def test_an_edited_file_stays(running: Running, content: bytes | None, edit: Callable[[bytes], bytes]) -> None:
    """Neither --undo nor another launch touches it; the copy stays, too."""
    file = settings_file(content)
    launch = ("launch", "continue", "--server", running.url, "--api-key", "secret", "--yes")
    assert run_here(*launch).code == 0
    file.write_bytes(edit(file.read_bytes()))
    before = {each.name: each.read_bytes() for each in file.parent.iterdir()}
    for words in (("launch", "continue", "--undo"), launch):
        run_here(*words).failed(40, "was edited since")
    assert {each.name: each.read_bytes() for each in file.parent.iterdir()} == before
    assert before.get("config.yaml.before-edgedec") == content


def test_models_go_before_those_that_are_there() -> None:
    """With their indentation; a list in one line is refused."""
    yaml = pytest.importorskip("yaml")
    entries = "  - name: new\n    roles: [chat]\n"
    for text in ("", "name: a", "models: # mine\n- name: old\n", OTHERS.decode()):
        models = yaml.safe_load(with_models(text, entries))["models"]
        assert (models[0], len(models)) == ({"name": "new", "roles": ["chat"]}, 1 + ("- name" in text))
    for text in ("models: [{name: old}]\n", '{"models": []}'):
        with pytest.raises(Exception, match="put these there by hand"):
            with_models(text, entries)
