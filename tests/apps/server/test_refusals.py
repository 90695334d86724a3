"""What is refused: malformed requests, too large ones, wrong keys, pages of other sites."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from support.models.tiny_models import tiny_llama
from support.processes.running_server import Running, messages, started

from edgedec.errors import RequestError
from edgedec_apps.server.app import build_app
from edgedec_apps.server.core.settings import Settings

CHAT = {"messages": messages("x"), "max_tokens": 1}
PICTURE = {"type": "image_url", "image_url": {"url": "x"}}
NO_SCHEMA = {"type": "json_schema", "json_schema": {}}


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "x"}, "messages", "must be a list of objects"),
        ({"top_k": 1.5}, "top_k", "must be a whole number"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'robot'"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "is 5"),
        ({"messages": [{"role": "user", "content": [PICTURE]}]}, "messages[0].content[0].image_url.url", ""),
        ({"temperature": -1}, "temperature", "temperature is -1.0; it must be a number from 0"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "too many digits"),
        ({"repetition_penalty": 10**400}, "repetition_penalty", "too many digits"),
        ({"top_p": -1}, "top_p", "above 0"),
        ({"stop_unsure": 1}, "stop_unsure", "above 0 and below 1"),
        ({"stop_unsure": "very"}, "stop_unsure", "must be a number"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "differ"),
        ({"n": 17}, "n", "1 to 16"),
        ({"seed": -(2**63) - 1}, "seed", "to 18446744073709551615"),
        ({"stop": ["a", 1]}, "stop", "list of strings"),
        ({"stop": ["x"] * 1001}, "stop", "at most 1,000"),
        ({"stop": ["x" * 16_385]}, "stop", "may have 16,384 together"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "0 to 259"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "-100 to 100"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "0 to 20"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "'yaml'"),
        ({"response_format": NO_SCHEMA}, "response_format.json_schema.schema", "missing"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "must be a string"),
        ({"tools": [{"type": "retrieval"}], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"mirostat": 2}, "mirostat", "is 2, which is not supported"),
        ({"penalize_newline": False}, "penalize_newline", "is False, which is not supported"),
        ({"top_n_sigma": True}, "top_n_sigma", "is True, which is not supported"),
        ({"chat_template": "{{ x }}"}, "chat_template", "would change the text"),
        ({"modalities": ["text", "audio"]}, "modalities", "not supported"),
        ({"functions": [{"name": "f"}]}, "functions", "not supported"),
        ({"speculative": {"draft": "always"}}, "speculative.draft", "'always'"),
        ({"speculative": {"verify": "magic"}}, "speculative.verify", "'magic'"),
        ({"reuse": "some"}, "reuse", "exact or longest"),
    ],
)
def test_a_field_is_refused_by_name(server: Running, fields: dict[str, Any], param: str, words: str) -> None:
    """Every malformed, unknown or unsupported value is a 400 in OpenAI's form that names the field and the reason."""
    reply = server.client.post("/v1/chat/completions", json=CHAT | fields)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert words in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [999]}, "prompt"),
        ({"prompt": {"text": "x"}}, "prompt"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of"),
        ({"prompt": "x", "best_of": 17}, "best_of"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "echo": True, "logprobs": 1}, "echo"),
    ],
)
def test_a_completions_field_is_refused_by_name(server: Running, fields: dict[str, Any], param: str) -> None:
    """The same for /v1/completions."""
    reply = server.client.post("/v1/completions", json=fields)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


@pytest.mark.slow
@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'"x"', b'{"n": NaN}', b'{"a": "\\ud800"}', b"\xff{}", b"[" * 100_000, b"9" * 5000]
)
def test_what_is_no_json_object(server: Running, body: bytes) -> None:
    """A body that is no JSON object in UTF-8 is a 400 that says so."""
    reply = server.client.post("/v1/chat/completions", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.slow
def test_more_texts_than_there_is_room_for(chat_path: Path) -> None:
    """Under a cap, texts that can't all be written to their ends are refused by name, also as a stream."""
    asked: dict[str, Any] = {"prompt": "x", "max_tokens": 600, "ignore_end": True}
    with started(chat_path, load_options={"memory": "2GB", "n_texts": 2, "draft": "suffix"}) as running:
        for fields in ({"n": 3}, {"n": 3, "stream": True}, {"n": 2, "best_of": 3}, {"prompt": ["x", "y"], "n": 3}):
            reply = running.client.post("/v1/completions", json=asked | fields)
            error = reply.json()["error"]
            param = "best_of" if "best_of" in fields else "n"
            assert (reply.status_code, error["param"], error["code"]) == (400, param, "no_room")
            assert "3 texts of up to 5" in error["message"]
            assert re.search(r"room for 2: ask for 2, 3 of at most \d+ tokens .* \(--texts\)", error["message"])
        whole = running.client.post("/v1/completions", json=asked | {"n": 2, "seed": 1}).json()
        n_prompt = whole["usage"]["prompt_tokens"]
        assert whole["usage"]["completion_tokens"] == 2 * (512 - n_prompt)
        short = running.client.post("/v1/completions", json=asked | {"n": 3, "max_tokens": 30}).json()
        assert short["usage"]["completion_tokens"] == 90


@pytest.mark.slow
def test_a_model_without_a_chat_template(tmp_path: Path) -> None:
    """Such a model continues texts; a chat with it is refused with the reason, before the stream begins."""
    with started(tiny_llama(tmp_path / "plain.gguf", n_layer=1), load_options={"n_ctx": 64}) as running:
        for stream in (False, True):
            chat = running.client.post("/v1/chat/completions", json=CHAT | {"stream": stream})
            assert chat.status_code == 400
            assert "has no chat template" in chat.json()["error"]["message"]
        asked = {"model": "plain", "prompt": "x", "stream": False, "options": {"num_predict": 3, "temperature": 0}}
        continued = running.client.post("/api/generate", json=asked).json()
        own = running.engine.generate("x", max_tokens=3, temperature=0).text
        assert (continued["response"], continued["eval_count"]) == (own, 3)
        refused = running.client.post("/api/generate", json=asked | {"system": "Be brief."})
        assert (refused.status_code, "system" in refused.json()["error"]) == (400, True)


@pytest.fixture(scope="module")
def guarded(chat_path: Path) -> Iterator[Running]:
    """A server that asks for a key, lets one origin in and takes bodies of 10 kB."""
    with started(chat_path, api_key="sesame", origins=("https://good.example",), max_body_bytes=10_000) as running:
        yield running


def test_an_oversized_body(guarded: Running) -> None:
    """A body beyond the limit is a 413, however it comes, and the connection's other requests still work."""
    large = json.dumps(CHAT | {"user": "x" * 20_000}).encode()

    def pieces() -> Iterator[bytes]:
        yield large

    for content in (large, pieces(), b"x" * 200_000):
        reply = guarded.client.post("/v1/chat/completions", content=content)
        assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")
    assert guarded.client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("header", ["", "Bearer wrong", "Bearer", "Basic sesame", "Bearer sesame2"])
def test_a_wrong_key(guarded: Running, header: str) -> None:
    """Without the key nothing but health and the page's files is answered."""
    headers = {"authorization": header}
    for method, path in (("GET", "/v1/models"), ("POST", "/api/chat"), ("GET", "/metrics"), ("GET", "/nothing")):
        reply = guarded.client.request(method, path, headers=headers)
        assert reply.status_code == 401, path
        assert reply.headers["www-authenticate"] == "Bearer"
    for path in ("/", "/health", "/static/app.js"):
        assert guarded.client.get(path, headers=headers).status_code == 200, path


def test_pages_of_other_sites(guarded: Running, server: Running) -> None:
    """A page of another origin may ask only where --cors names it, and no answer carries CORS headers otherwise."""
    evil = {"origin": "https://evil.example"}
    for running in (guarded, server):
        refused = running.client.post("/v1/chat/completions", json=CHAT, headers=evil)
        assert refused.status_code == 403
        assert running.client.get("/v1/models", headers={"sec-fetch-site": "cross-site"}).status_code == 403
        own = running.client.post("/v1/chat/completions", json=CHAT, headers={"origin": running.url})
        assert own.status_code == 200
        assert not [name for name in own.headers if name.startswith("access-control")]
    reply = guarded.client.post("/v1/chat/completions", json=CHAT, headers=GOOD)
    assert reply.headers["access-control-allow-origin"] == "https://good.example"
    asked = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    refused = guarded.client.options("/v1/chat/completions", headers=evil | asked)
    assert (refused.status_code, "--cors allows them" in refused.json()["error"]["message"]) == (403, True)
    assert not [name for name in refused.headers if name.startswith("access-control")]


GOOD = {"origin": "https://good.example"}
SENT = {
    "OpenAI's": "authorization,content-type,x-stainless-arch,x-stainless-lang,x-stainless-os,x-stainless-retry-count",
    "Anthropic's": "anthropic-beta,anthropic-dangerous-direct-browser-access,anthropic-version,content-type,x-api-key",
    "the next version's": "x-stainless-something-new,idempotency-key,traceparent",
    "none": "",
}


@pytest.mark.parametrize("client", SENT)
def test_a_page_that_is_let_in_may_send_what_its_library_sends(guarded: Running, client: str) -> None:
    """What the browser asks before is answered with yes, without a key, for every method of every address."""
    routes = [route for route in build_app(guarded.service).routes if isinstance(route, Route)]
    methods = {method for route in routes for method in route.methods or ()}
    assert methods == {"DELETE", "GET", "HEAD", "POST"}
    for method in methods:
        asked = {"access-control-request-method": method, "access-control-request-headers": SENT[client]}
        reply = guarded.client.options("/v1/messages", headers=GOOD | asked | {"authorization": ""})
        assert reply.status_code == 204
        assert reply.headers["access-control-allow-origin"] == "https://good.example"
        assert method in reply.headers["access-control-allow-methods"].split(", ")
        assert reply.headers["access-control-allow-headers"] == SENT[client]


@pytest.mark.parametrize(
    ("method", "path", "more", "status"),
    [
        ("POST", "/v1/chat/completions", {"json": CHAT}, 200),
        ("POST", "/v1/chat/completions", {"json": CHAT | {"stream": True}}, 200),
        ("POST", "/v1/chat/completions", {"content": b"{"}, 400),
        ("GET", "/v1/models", {"headers": {"authorization": ""}}, 401),
        ("GET", "/v1/models", {"headers": {"host": "evil.example"}}, 403),
        ("GET", "/v1/nothing", {}, 404),
        ("GET", "/v1/models/nothing", {}, 404),
        ("GET", "/static/nothing", {}, 404),
        ("GET", "/v1/messages", {}, 405),
        ("POST", "/v1/messages", {"content": b"x" * 20_000}, 413),
        ("POST", "/api/push", {}, 501),
        ("GET", "/static/broken", {}, 500),
    ],
)
def test_a_page_that_is_let_in_reads_every_answer(
    guarded: Running, method: str, path: str, more: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error, too, says which origin may read it, so that the page can show it; so does what no address catches."""
    if status == 500:
        monkeypatch.setattr(StaticFiles, "get_response", None)
    reply = guarded.client.request(method, path, **more | {"headers": GOOD | more.get("headers", {})})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == "https://good.example"
    assert (reply.headers["access-control-expose-headers"], reply.headers["vary"]) == ("*", "Origin")


_NOT_HERE = (
    *("evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example", "[", ""),
    *("evil.example@localhost", "evil.example:80@localhost:80", "localhost@evil.example", "localhost/evil.example"),
    *("evil.example?@localhost", "evil.example#@127.0.0.1", "localhost, evil.example", "localhost evil.example"),
    *("[localhost]", "[127.0.0.1]", "[::1", "::1", "[::1]evil.example", "[::1].evil.example", "[[::1]]"),
    *("localhost:http", "localhost:80:80", "localhost:", "localhost:123456", "localhost..", ".localhost", "localhost%"),
)
_HERE = ("localhost:1234", "LocalHost", "localhost.", "127.0.0.1", "127.9.9.9:1", "[::1]:80")


@pytest.mark.parametrize("host", [*_NOT_HERE, *_HERE])
def test_only_a_host_that_is_this_machine(server: Running, host: str) -> None:
    """On loopback a Host header that names another machine is refused: names can be pointed here (DNS rebinding)."""
    expected = 200 if host in _HERE else 403
    assert server.client.get("/v1/models", headers={"host": host}).status_code == expected


def test_the_name_of_a_proxy(chat_path: Path) -> None:
    """--allow-host lets the Host header of a proxy in, with the pages that it serves; the 403 of others names it."""
    with started(chat_path, hosts=("llm.example",)) as running:
        for host in ("llm.example", "LLM.example:8443", "llm.example.", "localhost"):
            own = {"host": host, "origin": f"https://{host}"}
            assert running.client.get("/v1/models", headers=own).status_code == 200
        for host in ("example", "evil.llm.example", "llm.example.evil", "llm.example@evil.example"):
            refused = running.client.get("/v1/models", headers={"host": host})
            assert (refused.status_code, "--allow-host" in refused.json()["error"]["message"]) == (403, True)


@pytest.mark.parametrize(
    "origin",
    [
        *("null", "https://evil.example", "http://evil.example@127.0.0.1:PORT", "http://127.0.0.1:PORT@evil.example"),
        *("http://127.0.0.1", "http://127.0.0.1:PORT.evil.example", "http://127.0.0.1:PORT/evil", "127.0.0.1:PORT"),
        *("ftp://127.0.0.1:PORT", "http://localhost:PORT", "http://127.0.0.1.:PORT", "evil://127.0.0.1:PORT", ""),
    ],
)
def test_an_origin_that_is_not_the_servers(server: Running, origin: str) -> None:
    """An origin is the server's own only where it is the very address that the request was sent to."""
    port = server.url.rpartition(":")[2]
    reply = server.client.get("/v1/models", headers={"origin": origin.replace("PORT", port)})
    assert reply.status_code == 403
    own = server.client.get("/v1/models", headers={"origin": server.url.upper().replace("HTTP", "http")})
    assert own.status_code == 200


def test_unknown_addresses_and_methods(server: Running) -> None:
    """An unknown address is a 404, a wrong method a 405, each in the form of the interface it is near."""
    assert server.client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert isinstance(server.client.get("/api/nothing").json()["error"], str)
    assert server.client.get("/v1/chat/completions").status_code == 405
    assert server.client.post("/api/push").status_code == 501


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"host": "0.0.0.0"}, "protect it with --api-key"),
        ({"host": "::"}, "protect it with --api-key"),
        ({"host": "my-machine"}, "protect it with --api-key"),
        ({"api_key": ""}, "--api-key must be"),
        ({"n_parallel": 0}, "--parallel is 0"),
        ({"origins": ("example.org",)}, "--cors is 'example.org'"),
        ({"hosts": ("llm.example:80",)}, "--allow-host is 'llm.example:80'"),
        ({"hosts": ("",)}, "--allow-host is ''"),
        ({"timeout_s": 0.0}, "--timeout is 0.0"),
        ({"port": 70_000}, "--port is 70000"),
    ],
)
def test_settings_that_make_no_sense(settings: dict[str, Any], words: str) -> None:
    """A server that others could reach without a key is refused, and so are values out of range."""
    with pytest.raises(RequestError, match=words):
        Settings(("m",), **settings)
    assert Settings(("m",), host="0.0.0.0", no_auth=True).on_loopback is False
