"""Requests name models, never paths: no answer tells whether a path of the server exists, and none is a failure."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.heads.tiny_heads import TinyHead, write_head
from support.models.tiny_models import N_VOCAB, tiny_llama
from support.processes.running_server import CHAT, Running, messages, started

from edgedec.gguf.file import read_gguf
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry.names import Names
from edgedec_export.head_to_gguf import write_head_gguf
from edgedec_runtimes.trained_heads.load import load_head

pytestmark = pytest.mark.slow

HEAD = TinyHead(n_embd=64, n_embd_target=64, n_head=4, head_dim=16, taps=(1, 2, 3), n_vocab_target=N_VOCAB)
DEEP = replace(HEAD, taps=(5, 6, 7))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with a model and two heads, which is the configuration's folder and the current one, too."""
    models = tmp_path / "models"
    models.mkdir()
    model = tiny_llama(models / "ape.gguf", n_layer=4, n_ctx_train=2048, chat_template=CHAT)
    deeper = tiny_llama(tmp_path / "deeper.gguf", n_layer=8)
    for name, tiny, target in (("good", HEAD, model), ("deep", DEEP, deeper)):
        write_head(tmp_path / f"folder of {name}", tiny)
        head = load_head(tmp_path / f"folder of {name}")
        write_head_gguf(head, read_gguf(target), models / f"{name}.head.gguf")
    (tmp_path / "secret").write_text("text")
    (tmp_path / "secret.gguf").write_bytes(b"GGUF")
    for name in ("EDGEDEC_CACHE", "EDGEDEC_CONFIG"):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.delenv("EDGEDEC_MODELS", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def running(home: Path) -> Iterator[Running]:
    """A server of that cache, without models at the start."""
    with started(load_options={"draft": "auto"}) as running:
        yield running


def _pairs(home: Path) -> list[tuple[str, str]]:
    """Return paths that exist, each with one of the same form that does not."""
    return [
        (str(home / "secret"), str(home / "absent")),
        (str(home / "models" / "good.head.gguf"), str(home / "models" / "some.head.gguf")),
        ("./secret", "./absent"),
        ("secret", "absent"),
        ("secret.gguf", "absent.gguf"),
        ("folder of good", "folder of none"),  # a folder with a sound head
        (f"file://{home}/secret", f"file://{home}/absent"),
        ("models/../secret", "models/../absent"),
        (f"ollama:../../..{home}/secret", f"ollama:../../..{home}/absent"),
        (f"hf:../..{home}/secret", f"hf:../..{home}/absent"),
    ]


BODIES: list[tuple[str, str, dict[str, Any], str]] = [
    ("POST", "/api/create", {"model": "new", "from": "ape"}, "draft_head"),
    ("POST", "/api/create", {"model": "new"}, "from"),
    ("POST", "/api/copy", {"destination": "new"}, "source"),
    ("POST", "/api/pull", {"stream": False}, "model"),
    ("DELETE", "/api/delete", {}, "model"),
    ("POST", "/api/show", {}, "model"),
    ("POST", "/api/chat", {"messages": messages("x")}, "model"),
    ("POST", "/api/embed", {"input": "x"}, "model"),
    ("POST", "/v1/chat/completions", {"messages": messages("x")}, "model"),
    ("POST", "/v1/messages", {"messages": messages("x"), "max_tokens": 1}, "model"),
    ("POST", "/v1/rerank", {"query": "x", "documents": ["y"]}, "model"),
    ("POST", "/tokenize", {"content": "x"}, "model"),
]


def test_no_answer_tells_whether_a_path_exists(running: Running, home: Path) -> None:
    """The answers to a path that exists and to one that doesn't differ only in what the request said: a 4xx."""

    def ask(method: str, path: str, body: dict[str, Any], value: str) -> tuple[int, str]:
        reply = running.client.request(method, path, content=json.dumps(body))
        return reply.status_code, reply.text.replace(json.dumps(value)[1:-1], "VALUE").replace(value, "VALUE")

    for method, path, body, field in BODIES:
        for there, absent in _pairs(home):
            found, missing = (ask(method, path, body | {field: value}, value) for value in (there, absent))
            assert found == missing, (path, field, there)
            assert 400 <= found[0] < 500, (path, field, found)
            assert str(home) not in found[1]
    assert not (home / "presets").exists()


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"draft_head": "ape"}, "draft_head is 'ape'"),
    ({"draft_head": "deep.head"}, "draft_head is 'deep.head'"),
    ({"draft_head": "hf:some/head"}, "no draft head 'hf:some/head'"),
    ({"draft_head": "\0"}, "no draft head"),
    ({"draft_head": 5}, "draft_head is 5"),
    ({"draft_head": ["x"]}, "draft_head is"),
    ({"from": 5}, "from is 5"),
    ({"from": {"a": 1}}, "from is"),
    ({"template": "{% if %}"}, "template"),
    ({"template": "{{ messages | nothing }}"}, "template"),
    ({"system": "\ud800"}, "not valid JSON"),
    ({"system": "x" * 1_100_000}, "1000000"),
    ({"model": "n" * 300}, "no name for a preset"),
    ({"stream": "x"}, "stream is 'x'"),
]


def test_wrong_presets_are_refused(running: Running, home: Path) -> None:
    """A field that can't be used is a 400 in ollama's form that names it, and nothing is written."""
    for fields, words in WRONG:
        given = {"model": "new", "from": "ape"} | fields
        reply = running.client.post("/api/create", content=json.dumps(given))
        assert (reply.status_code, list(reply.json())) == (400, ["error"]), fields
        assert words in reply.json()["error"]
    assert not (home / "presets").exists()


NO_NAMES = (
    "default",
    "Default",
    "default:latest",
    " ",
    "\n",
    "a\nb",
    " a",
    "a\t",
    "a\u2028b",
    "\u202ea",
    "a\u200b",
    "a\x7f",
)
TAKEN = ("ape", "ape:latest", "ape#mean", "qwen3-4b")  # models that are here, and one that may be pulled


def test_a_preset_can_not_take_a_name_for_everybody(running: Running, home: Path) -> None:
    """What clients call any model, what nobody sees, and a model's name are refused by create and copy, by name."""
    for name in (*NO_NAMES, *TAKEN):
        made = running.client.post("/api/create", json={"model": name, "from": "ape"})
        copied = running.client.post("/api/copy", json={"source": "ape", "destination": name})
        assert (made.status_code, copied.status_code) == (400, 400), name
        assert repr(name.removesuffix(":latest")) in made.json()["error"]
    assert not (home / "presets").exists()


def test_names_of_the_command_line_are_not_a_presets(home: Path) -> None:
    """A preset that is called default, or as an alias, by an earlier version or by hand, changes no other request."""
    (home / "presets").mkdir()
    for name in ("default", "alias", "poet"):
        (home / "presets" / f"{name}.toml").write_text('model = "ape"\nsystem = "Obey me."')
    names = Names(Settings(models=("ape",), aliases=("alias",)))
    for asked in (None, "default", "default:latest", "alias", "ape"):
        assert (names.find(asked).name, names.find(asked).system) == ("ape", "")
    assert names.find("poet").system == "Obey me."
    assert [named.name for named in names.all()][:2] == ["ape", "poet"]


DAMAGED = {
    "text.toml": b"model = ",
    "bytes.toml": b"\xff\xfe",
    "large.toml": b"#" * 1_100_000,
    "value.toml": b'model = "ape"\n[options]\ntop_p = 7',
    "cut.gguf": b"GGUF\x03\x00\x00\x00\x07",
    "junk.gguf": b"GGUF" + b"\xff" * 400,
}


def test_a_damaged_file_is_named(running: Running, home: Path) -> None:
    """A preset or a model whose file is damaged is a 404 that names it; lists, and other models, go on."""
    (home / "presets").mkdir()
    for name, data in DAMAGED.items():
        path = home / ("presets" if name.endswith(".toml") else "models") / name
        path.write_bytes(data)
        asked = {"model": path.stem, "messages": messages("x")}
        for address in ("/api/chat", "/v1/chat/completions", "/v1/messages"):
            reply = running.client.post(address, json=asked | {"max_tokens": 1} if "v1" in address else asked)
            assert (reply.status_code, str(path) in reply.text) == (404, True), reply.text
    listed = [model["name"] for model in running.client.get("/api/tags").json()["models"]]
    assert (listed, running.client.get("/api/ps").status_code) == (
        ["ape", "cut", "deep.head", "good.head", "junk"],
        200,
    )
    assert {model["id"] for model in running.client.get("/v1/models").json()["data"]} == set(listed)
    sound = {"model": "ape", "messages": messages("x"), "options": {"num_predict": 1}}
    assert running.client.post("/api/chat", json=sound).status_code == 200
    for name in DAMAGED:
        stem = name.partition(".")[0]
        assert running.client.request("DELETE", "/api/delete", json={"model": stem}).status_code == 200, name
    assert list((home / "presets").iterdir()) == []


def test_a_head_with_a_name_is_used(running: Running) -> None:
    """A head of the cache is named as a model is; "off" uses none."""
    for name, head in (("fast", "good.head"), ("plain", "off")):
        made = running.client.post("/api/create", json={"model": name, "from": "ape", "draft_head": head})
        assert made.status_code == 200, made.text
        asked = {"model": name, "messages": messages("x"), "options": {"num_predict": 1}}
        assert running.client.post("/api/chat", json=asked).status_code == 200
        stats = running.engine_of(name).generate("x", max_tokens=1).stats
        assert ("the head " in "".join(stats.explanation)) == (name == "fast")
