"""ollama's own client against the server."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.models.tiny_models import tiny_llama
from support.processes.running_server import Running, messages, started
from support.processes.servers import StubServer, catalogue_of, model_bytes

import edgedec

ollama = pytest.importorskip("ollama")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[Any]:
    """ollama's client, pointed at the server."""
    client = ollama.Client(host=server.url, timeout=60)
    yield client
    client.close()


def test_the_model_is_listed_and_described(client: Any, server: Running) -> None:
    """list, ps and show tell of the model that is served, and list of those on this machine, too."""
    listed, *_ = client.list().models
    assert (listed.model, listed.details.family, listed.details.format) == ("tiny", "llama", "gguf")
    (running,) = client.ps().models
    assert (running.model, running.context_length) == ("tiny", 512)
    shown = client.show("tiny:latest")
    assert shown.modelinfo["llama.context_length"] == 4096
    assert shown.capabilities == ["completion", "tools"]
    assert "temperature" in shown.parameters


LEAST = {"Copilot": (0, 6, 4), "Raycast": (0, 6, 4), "Continue": (0, 6, 5), "Codex": (0, 13, 4)}


def test_the_version_is_one_that_clients_take(server: Running) -> None:
    """It is ollama's, three numbers that are at least what each client asks for; edgedec's own stands beside it."""
    told = server.client.get("/api/version").json()
    assert told == {"version": told["version"], "edgedec": edgedec.__version__}
    assert tuple(map(int, told["version"].split("."))) >= max(LEAST.values())


def test_a_chat_is_the_engines(client: Any, server: Running) -> None:
    """A chat has the engine's text, whole and as a stream, under ollama's names of the options."""
    options = {"num_predict": 12, "seed": 5, "temperature": 0.9, "repeat_penalty": 1.1, "num_ctx": 512}
    own = server.engine.chat(messages("Hello"), max_tokens=12, seed=5, temperature=0.9, repetition_penalty=1.1)
    whole = client.chat("tiny", messages("Hello"), options=options)
    assert (whole.message.content, whole.done_reason, whole.eval_count) == (own.text, "length", 12)
    assert whole.prompt_eval_count == own.stats.n_prompt_tokens
    parts = list(client.chat("tiny", messages("Hello"), options=options, stream=True))
    assert "".join(part.message.content for part in parts) == own.text
    assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1].eval_count == 12
    assert (whole.load_duration, parts[-1].load_duration) == (0, 0)  # the model was there before


def test_generate_uses_the_template_unless_raw(client: Any, server: Running) -> None:
    """A prompt is a chat's first message, after the system message; raw continues it as it is."""
    options = {"num_predict": 8, "temperature": 0}
    told = [{"role": "system", "content": "Be brief."}, *messages("Hi")]
    chat = server.engine.chat(told, max_tokens=8, temperature=0).text
    assert client.generate("tiny", "Hi", system="Be brief.", options=options).response == chat
    raw = server.engine.generate("Hi", max_tokens=8, temperature=0).text
    parts = client.generate("tiny", "Hi", raw=True, options=options, stream=True)
    assert "".join(part.response for part in parts) == raw


def test_an_empty_request_is_answered_at_once(client: Any) -> None:
    """A request without messages or prompt only asks that the model is loaded."""
    assert client.chat("tiny").done_reason == "load"
    assert client.generate("tiny", "").done_reason == "load"


def test_a_stop_string_and_a_schema(client: Any, server: Running) -> None:
    """A stop string and a schema under `format` are kept as the engine keeps them, in a stream, too."""
    text = server.engine.chat(messages("Hi"), max_tokens=24, seed=6).text
    stopped = client.chat("tiny", messages("Hi"), options={"num_predict": 24, "seed": 6, "stop": [text[5:8]]})
    own = server.engine.chat(messages("Hi"), max_tokens=24, seed=6, stop=(text[5:8],))
    assert (stopped.message.content, stopped.done_reason) == (own.text, "stop")
    assert own.text == text[: text.index(text[5:8])]
    schema: dict[str, Any] = {"type": "object", "properties": {"n": {"enum": [1, 2, 3]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    own = server.engine.chat(messages("Hi"), seed=6, json_schema=schema)
    parts = list(client.chat("tiny", messages("Hi"), format=schema, options={"seed": 6}, stream=True))
    assert "".join(part.message.content for part in parts) == own.text
    assert json.loads(own.text)["n"] in (1, 2, 3)


def test_a_text_ends_where_the_model_is_unsure(client: Any, server: Running) -> None:
    """The option stop_unsure is the engine's; ollama's field says "stop", ours that the model was unsure."""
    own = server.engine.generate("Hi", max_tokens=8, temperature=0, stop_unsure=0.99)
    options = {"num_predict": 8, "temperature": 0, "stop_unsure": 0.99}
    reply = client.generate("tiny", "Hi", raw=True, options=options)
    assert (reply.response, reply.done_reason) == (own.text, "stop")
    asked = {"model": "tiny", "prompt": "Hi", "raw": True, "options": options, "stream": False}
    (told,) = server.client.post("/api/generate", json=asked).json()["edgedec"]["generations"]
    assert (told["finish_reason"], told["chance_right"]) == ("unsure", own.stats.chance_right)


def test_logprobs(client: Any, server: Running) -> None:
    """Log-probabilities are the engine's."""
    own = server.engine.chat(messages("Hi"), max_tokens=4, temperature=0, logprobs=1)
    reply = client.chat(
        "tiny", messages("Hi"), logprobs=True, top_logprobs=1, options={"num_predict": 4, "temperature": 0}
    )
    assert [entry.logprob for entry in reply.logprobs] == [output.logprob for output in own.outputs]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_ctx": 8192}, "options.num_ctx is 8192; the largest that fits is 4096: the model was trained for 4096"),
        ({"mirostat": 2}, "options.mirostat is 2"),
        ({"top_p": 7.0}, "options.top_p is 7.0"),
        ({"num_predict": 0}, "options.num_predict is 0"),
        ({"stop_unsure": 0.0}, "options.stop_unsure is 0.0; it must be above 0 and below 1"),
    ],
)
def test_refusals_name_the_option(client: Any, options: dict[str, Any], words: str) -> None:
    """What would change the text and is not had here is refused by name, in ollama's form of an error."""
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("tiny", messages("x"), options=options)
    assert caught.value.status_code == 400
    assert words in caught.value.error


def test_draft_num_predict(tmp_path: Path) -> None:
    """0 switches drafts off for the request, on /api/generate and /api/chat; the text is always the same."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    path = tiny_llama(tmp_path / "drafts.gguf", chat_template=template)
    counts: dict[tuple[str, int | None], int] = {}
    texts = set()
    with started(path, load_options={"draft": "suffix"}) as running:
        for address, said in (("/api/generate", {"prompt": "Hi"}), ("/api/chat", {"messages": messages("Hi")})):
            for more in ({}, {"draft_num_predict": 4}, {"draft_num_predict": 0}):
                options = {"num_predict": 60, "temperature": 0, **more}
                asked: dict[str, Any] = {"model": "drafts", "stream": False, "options": options, **said}
                reply = running.client.post(address, json=asked).json()
                texts.add(reply["response"] if "response" in reply else reply["message"]["content"])
                counts[address, more.get("draft_num_predict")] = reply["edgedec"]["generations"][0]["n_drafts"]
    assert len(texts) == 1
    assert [n > 0 for n in counts.values()] == [asked_for != 0 for _, asked_for in counts]


def test_another_model_is_not_found(client: Any) -> None:
    """Another model's name is a 404."""
    with pytest.raises(ollama.ResponseError, match="there is no model 'llama9' here") as caught:
        client.chat("llama9", messages("x"))
    assert caught.value.status_code == 404


def test_pull_fetches_into_the_cache(
    client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server: Running
) -> None:
    """pull streams its progress and ends with success; a file's path and an unknown name are refused."""
    data = model_bytes(100_000)
    monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("EDGEDEC_CONFIG", str(tmp_path))
    with StubServer() as stub:
        catalogue_of(stub, tmp_path, "small", data)
        parts = list(client.pull("small", stream=True))
    assert parts[-1].status == "success"
    assert any(part.total == part.completed == len(data) for part in parts)
    assert (tmp_path / "cache" / "models" / "small.gguf").read_bytes() == data
    assert client.pull("small").status == "success"
    with pytest.raises(ollama.ResponseError, match="can't be pulled"):
        client.pull(str(tmp_path / "catalogue.toml"))
    with pytest.raises(ollama.ResponseError, match="no model is called 'no-such'"):
        client.pull("no-such")
