"""Filling in the middle, and tokens: /infill, `suffix` in both interfaces, /tokenize and /detokenize."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.models.real_models import real_model
from support.models.saying_model import saying_model
from support.processes.running_server import Running, started

from edgedec.errors import PromptTooLongError, RequestError
from edgedec_apps.infill import infill_ids
from edgedec_apps.server.core.fields import IGNORED_HEADER

openai = pytest.importorskip("openai")
ollama = pytest.importorskip("ollama")

pytestmark = pytest.mark.slow

PRE, SUF, MID, REPO, FILE = "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>"
SAYS = {MID: ["a", " + b"], PRE: [], SUF: [], REPO: [], FILE: [], "=": ["of", "f"]}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a model that writes "a + b" after the token for the middle."""
    with started(saying_model(tmp_path_factory.mktemp("infill") / "fim.gguf", SAYS), n_parallel=1) as running:
        yield running


def ids_of(running: Running, text: str) -> list[int]:
    """Return the tokens of a text with its special tokens, after the one that begins every text."""
    return running.engine.tokenizer.encode(text, parse_special=True)


def test_the_prompt_is_the_models(running: Running) -> None:
    """What stands before, after and between is in the order that the model knows; what users write is only text."""
    engine = running.engine
    assert infill_ids(engine, "def f(", "):") == ids_of(running, f"{PRE}def f({SUF}):{MID}")
    with_files = infill_ids(engine, "x", "y", files=[("a.py", "A"), ("b.py", "B")])
    files = f"{REPO}myproject\n{FILE}a.py\nA{FILE}b.py\nB{FILE}filename\n"
    assert with_files == ids_of(running, f"{files}{PRE}x{SUF}y{MID}")
    with pytest.raises(PromptTooLongError):
        infill_ids(engine, "x" * 600, "y")
    with pytest.raises(PromptTooLongError):
        infill_ids(engine, "x" * 300, "y" * 300)


def test_openais_suffix(running: Running) -> None:
    """Completions with a suffix fill the gap, whole and as a stream, several prompts at once."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        reply = client.completions.create(model="fim", prompt="return ", suffix="\n")
        assert reply.choices[0].text == "a + b"
        assert reply.usage.prompt_tokens == len(infill_ids(running.engine, "return ", "\n"))
        parts = client.completions.create(model="fim", prompt="return ", suffix="\n", stream=True)
        assert "".join(part.choices[0].text for part in parts) == "a + b"
        two = client.completions.create(model="fim", prompt=["x", "y"], suffix="z")
        assert [choice.text for choice in two.choices] == ["a + b"] * 2
        assert client.completions.create(model="fim", prompt="=", suffix="").choices[0].text == "off"


def test_ollamas_suffix(running: Running) -> None:
    """generate with a suffix fills the gap; show says that the model can."""
    client = ollama.Client(host=running.url, timeout=60)
    reply = client.generate("fim", "return ", suffix="\n")
    assert (reply.response, reply.prompt_eval_count) == ("a + b", len(infill_ids(running.engine, "return ", "\n")))
    assert client.generate("fim", "", suffix="\n").response == "a + b"
    assert "insert" in client.show("fim").capabilities
    client.close()


def test_llama_servers_infill(running: Running) -> None:
    """The form is llama-server's, whole and as a stream; other files and the beginning of the middle are read."""
    asked: dict[str, Any] = {"input_prefix": "return ", "input_suffix": "\n", "n_predict": 20}
    reply = running.client.post("/infill", json=asked).json()
    assert (reply["content"], reply["stop"], reply["stop_type"], reply["tokens_predicted"]) == ("a + b", True, "eos", 2)
    assert reply["timings"]["predicted_n"] == 2
    lines = running.client.post("/infill", json=asked | {"stream": True}).text.split("\n\n")
    parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert "".join(part["content"] for part in parts) == "a + b"
    assert [part["stop"] for part in parts] == [False, False, True]
    more = asked | {"input_extra": [{"filename": "a.py", "text": "A"}], "prompt": "a"}
    told = running.client.post("/infill", json=more).json()
    expected = f"{REPO}myproject\n{FILE}a.py\nA{FILE}filename\n{PRE}return {SUF}\n{MID}a"
    assert (told["content"], told["tokens_evaluated"]) == (" + b", len(ids_of(running, expected)))
    stopped = running.client.post("/infill", json=asked | {"stop": ["+"]}).json()
    assert (stopped["content"], stopped["stop_type"], stopped["stopping_word"]) == ("a ", "word", "+")
    assert running.client.post("/infill", json=asked | {"n_predict": 1}).json()["stop_type"] == "limit"


def test_editors_warm_up(running: Running) -> None:
    """n_predict: 0 reads the prompt and writes nothing; the next request finds it in the KV cache."""
    sent = {"samplers": ["top_k"], "n_indent": 0, "t_max_prompt_ms": 500, "t_max_predict_ms": 1, "id_slot": 0}
    asked = {"input_prefix": "warm ", "input_suffix": "up", "cache_prompt": True, "repeat_penalty": 1.0} | sent
    warm = running.client.post("/infill", json=asked | {"n_predict": 0})
    assert (warm.json()["content"], warm.json()["tokens_predicted"]) == ("", 0)
    assert set(warm.headers[IGNORED_HEADER].split(", ")) == {"samplers", "t_max_prompt_ms", "t_max_predict_ms"}
    reply = running.client.post("/infill", json=asked | {"n_predict": 9}).json()
    assert (reply["content"], reply["tokens_cached"]) == ("a + b", reply["tokens_evaluated"] - 1)


def test_tokens_and_back(running: Running) -> None:
    """Ids and pieces are the tokenizer's, special tokens are read unless that is off, and back it is a text."""
    text = f"Ünï = {MID}"

    def ids(**fields: Any) -> Any:
        return running.client.post("/tokenize", json={"content": text} | fields).json()["tokens"]

    tokenizer = running.engine.tokenizer
    assert ids() == tokenizer.encode(text, add_special=False, parse_special=True)
    assert ids(add_special=True) == tokenizer.encode(text, parse_special=True)
    assert ids(parse_special=False) == tokenizer.encode(text, add_special=False)
    pieces = ids(with_pieces=True)
    assert [piece["id"] for piece in pieces] == ids()
    assert pieces[0]["piece"] == [0xC3]  # half a character
    assert pieces[-2]["piece"] == " "
    body = {"tokens": tokenizer.encode("Ünï", add_special=False), "model": "fim"}
    assert running.client.post("/detokenize", json=body).json() == {"content": "Ünï"}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [5], "suffix": "x"}, "suffix"),
        ("/v1/completions", {"prompt": "x", "suffix": "x", "echo": True}, "suffix"),
        ("/v1/completions", {"prompt": "x", "suffix": 5}, "suffix"),
        ("/infill", {"input_prefix": 5}, "input_prefix"),
        ("/infill", {"input_extra": ["x"]}, "input_extra"),
        ("/infill", {"input_extra": [{"text": 5}]}, "input_extra[0].text"),
        ("/infill", {"n_predict": -2}, "n_predict"),
        ("/infill", {"input_prefix": "x" * 600}, "messages"),
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": ["x"]}, "content"),
        ("/tokenize", {"content": "x", "with_pieces": 1}, "with_pieces"),
        ("/tokenize", {"content": "x", "model": "gpt-x"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": "x"}, "tokens"),
        ("/detokenize", {"tokens": [True]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**9]}, "tokens"),
    ],
)
def test_what_is_refused(running: Running, path: str, fields: dict[str, Any], param: str) -> None:
    """A malformed field is a 400 that names it; an unknown model is a 404."""
    reply = running.client.post(path, json=fields)
    assert reply.status_code == (404 if param == "model" else 400), reply.text
    assert reply.json()["error"]["param"] == param


def test_a_text_that_takes_too_much_memory(running: Running) -> None:
    """A text whose tokens would not fit into the memory for requests is a 413."""
    reply = running.client.post("/tokenize", json={"content": "x" * 7_000_000, "with_pieces": True})
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "too_large")


def test_a_model_without_these_tokens(server: Running) -> None:
    """It is refused by name, wherever a gap is to be filled."""
    for path, fields in (
        ("/v1/completions", {"prompt": "x", "suffix": "y"}),
        ("/infill", {"input_prefix": "x", "input_suffix": "y"}),
        ("/api/generate", {"model": "tiny", "prompt": "x", "suffix": "y"}),
    ):
        reply = server.client.post(path, json=fields)
        assert reply.status_code == 400
        assert "no tokens for filling in the middle" in reply.text
    with pytest.raises(RequestError, match="no tokens for filling in the middle"):
        infill_ids(server.engine, "x", "y")


@pytest.mark.model
def test_a_real_coder() -> None:
    """The 0.5B coder fills the gap of a function, and its prompt is the one of its makers."""
    with started(real_model("qwen2.5-coder-0.5b.gguf")) as running:
        before, after = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"
        asked = {"input_prefix": before, "input_suffix": after, "n_predict": 8, "temperature": 0}
        assert running.client.post("/infill", json=asked).json()["content"].split("\n")[0] == "a + b"
        assert infill_ids(running.engine, before, after) == ids_of(running, f"{PRE}{before}{SUF}{after}{MID}")


def test_the_reading_of_the_prompt_is_told(running: Running) -> None:
    """In a stream that wants it, before the text, which stays the same."""
    asked = {"input_prefix": "return ", "input_suffix": "\n", "stream": True}
    found = []
    for wanted in (True, False):
        reply = running.client.post("/infill", json=asked | {"return_progress": wanted})
        lines = [line for line in reply.text.splitlines() if line.startswith("data: ")]
        found.append([json.loads(line.removeprefix("data: ")) for line in lines])
    told = [part for part in found[0] if "prompt_progress" in part]
    assert told == found[0][: len(told)] != []
    assert told[-1]["prompt_progress"]["total"] == found[0][-1]["tokens_evaluated"]
    assert all((part["content"], part["tokens"], part["stop"]) == ("", [], False) for part in told)
    assert [part["content"] for part in found[0][len(told) :]] == [part["content"] for part in found[1]]
