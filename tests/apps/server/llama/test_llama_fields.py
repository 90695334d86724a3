"""What llama-server's clients and others send: what can be done is done, and what is ignored is named."""

import socket
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_models import tiny_llama
from support.processes import running_server
from support.processes.running_server import CHAT, PATIENCE_S, Running, messages, started, wait_until

from edgedec.progress import CancelToken
from edgedec_apps.server.core.fields import IGNORED_HEADER
from edgedec_apps.server.core.settings import Settings
from edgedec_apps.server.registry.models import Prepare, Prepared, Recipe
from edgedec_apps.server.serving import address_of, open_socket

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
GBNF = 'root ::= "<" [xy]{2,3} ">"'
IGNORED = {"samplers": ["top_k", "temperature"], "t_max_predict_ms": 500, "n_keep": 4, "return_tokens": True}
SILENT: dict[str, Any] = {"typical_p": 1.0, "mirostat": 0, "mirostat_tau": 5.0, "xtc_probability": 0, "id_slot": -1}
SILENT |= {"dry_multiplier": 0.0, "dry_base": 1.75, "cache_prompt": True, "lora": [], "reasoning_format": "auto"}


def post(running: Running, path: str, **fields: Any) -> Any:
    """Return what the server answers to a request that ends after few tokens."""
    given = {"messages": messages("x")} if "chat" in path else {"prompt": "x"}
    reply = running.client.post(path, json=given | {"temperature": 0} | fields)
    assert reply.status_code == 200, reply.text
    return reply


def text(running: Running, path: str, **fields: Any) -> str:
    """Return the text that the server answers with."""
    choice: dict[str, Any] = post(running, path, **fields).json()["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


PATHS = ("/v1/chat/completions", "/v1/completions")


@pytest.mark.parametrize("path", PATHS)
def test_a_schema_in_each_of_llama_servers_forms(server: Running, path: str) -> None:
    """An object of json_object or json_schema may have the schema itself, as instructor's JSON_SCHEMA mode sends it."""
    for given in (
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
        {"json_schema": SCHEMA},
    ):
        assert text(server, path, max_tokens=40, **given) in ('{"a": 1}', '{"a": 2}')


@pytest.mark.parametrize("path", PATHS)
def test_a_grammar_is_gbnf(server: Running, path: str) -> None:
    """As with llama-server; a malformed one is a 400 that has its line."""
    found = text(server, path, grammar=GBNF, n_predict=40)
    assert found[0] + found[-1] == "<>"
    assert set(found[1:-1]) <= {"x", "y"}
    assert text(server, path, grammar="", max_tokens=3) == text(server, path, max_tokens=3)
    asked = {"messages": messages("x")} if "chat" in path else {"prompt": "x"}
    reply = server.client.post(path, json=asked | {"grammar": "root ::= [x"})
    assert (reply.status_code, "line 1: expected" in reply.text) == (400, True)
    reply = server.client.post(path, json=asked | {"grammar": GBNF, "json_schema": SCHEMA})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "grammar")


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_other_names_for_what_there_is(server: Running, path: str) -> None:
    """n_predict, repeat_penalty, repeat_last_n, ignore_eos and n_probs do what the fields here do."""
    reply = post(server, path, n_predict=7, ignore_eos=True, n_probs=2).json()
    assert reply["usage"]["completion_tokens"] == 7
    assert reply["choices"][0]["logprobs"] is not None
    theirs = {"repeat_penalty": 1.8, "repeat_last_n": 20, "ignore_eos": True, "n_predict": 30}
    ours = {"repetition_penalty": 1.8, "penalty_last_n": 20, "ignore_end": True, "max_tokens": 30}
    assert text(server, path, **theirs) == text(server, path, **ours)
    assert text(server, path, **theirs) != text(server, path, **ours | {"repetition_penalty": 1.0})
    assert text(server, path, top_k=-1, max_tokens=3) == text(server, path, max_tokens=3)
    assert post(server, path, n_probs=0, max_tokens=3).json()["choices"][0].get("logprobs") is None


def test_a_bias_in_llama_servers_form(server: Running) -> None:
    """A list of token ids or texts with a number, or false, which rules a token out."""
    plain = text(server, "/v1/completions", max_tokens=1)
    (token_id,) = server.engine.tokenizer.encode("q", add_special=False)
    for bias in ([[token_id, 100]], [["q", 100.0]], {str(token_id): 100}):
        assert text(server, "/v1/completions", max_tokens=2, logit_bias=bias) == "qq"
    banned = [[each, False] for each in server.engine.tokenizer.encode(plain, add_special=False)]
    assert text(server, "/v1/completions", max_tokens=1, logit_bias=banned) != plain
    for wrong in (["q"], [["", 1]], [[-1, 1]], [["q", True]], [["q", 101]], [[10**9, 1]], "q", {"q": 1}, {"1": False}):
        reply = server.client.post("/v1/completions", json={"prompt": "x", "logit_bias": wrong})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "logit_bias"), wrong


@pytest.mark.parametrize("path", PATHS)
def test_what_is_ignored_is_named(server: Running, path: str) -> None:
    """What llama-server's own page sends is taken; a sampler that there is not is refused where it is switched on."""
    reply = post(server, path, max_tokens=2, **IGNORED, **SILENT)
    assert set(reply.headers[IGNORED_HEADER].split(", ")) == set(IGNORED)
    for name, value in (("mirostat", 2), ("dry_multiplier", 0.8), ("lora", [{"id": 0}]), ("repeat_penalty", -1)):
        asked: dict[str, Any] = {"messages": messages("x")} if "chat" in path else {"prompt": "x"}
        refused = server.client.post(path, json=asked | {name: value})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, name)
    asked |= {"repeat_penalty": 1.1, "repetition_penalty": 1.2}
    assert "differ; give one of them" in server.client.post(path, json=asked).json()["error"]["message"]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    ape, bee = (tmp_path_factory.mktemp("two") / f"{name}.gguf" for name in ("ape", "bee"))
    return tiny_llama(ape, chat_template=CHAT), tiny_llama(bee, chat_template=CHAT)


@pytest.mark.slow
def test_keep_alive_and_default(two: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The first model of the command line, or the only one loaded, is called "default"; keep_alive is kept."""
    monkeypatch.setenv("EDGEDEC_MODELS", str(two[1].parent))
    with started(two[0]) as running:
        reply = post(running, "/v1/chat/completions", model="default", max_tokens=1)
        assert reply.json()["model"] == "ape"
        assert running.client.post("/api/chat", json={"model": "default:latest"}).status_code == 200
    with started() as running:
        asked = {"messages": messages("x"), "model": "default", "max_tokens": 1}
        refused = running.client.post("/v1/chat/completions", json=asked)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
        post(running, "/v1/completions", model="bee", max_tokens=1, keep_alive="1h")
        assert post(running, "/v1/chat/completions", model="default", max_tokens=1).json()["model"] == "bee"
        post(running, "/v1/completions", model="bee", max_tokens=1, keep_alive=0)
        wait_until(lambda: running.loaded == [], "the model stays")
        wrong = running.client.post("/v1/completions", json={"prompt": "x", "model": "bee", "keep_alive": "soon"})
        assert (wrong.status_code, "keep_alive" in wrong.text) == (400, True)


@pytest.mark.slow
def test_requests_wait_while_the_first_model_loads(chat_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are answered as soon as it is there, as they are while another model is loaded."""
    listeners: list[socket.socket] = []

    def opened(settings: Settings) -> socket.socket:
        listeners.append(open_socket(settings))
        return listeners[0]

    def waiting(prepare: Prepare) -> Prepare:
        def prepared(recipe: Recipe, n_ctx: int | None, cancel: CancelToken) -> Prepared:
            replies.append(pool.submit(httpx.post, url, json=asked, timeout=PATIENCE_S))
            assert wait(replies, timeout=0.3).done == set(), "it waits"
            return prepare(recipe, n_ctx, cancel)

        url = f"{address_of(listeners[0])}/v1/chat/completions"
        return prepared

    replies: list[Future[httpx.Response]] = []
    asked = {"messages": messages("x"), "max_tokens": 1}
    monkeypatch.setattr(running_server, "open_socket", opened)
    with ThreadPoolExecutor() as pool, started(chat_path, adapt=waiting):
        assert replies[0].result().status_code == 200
