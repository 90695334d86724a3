"""Embeddings with the clients of OpenAI and ollama, against the engine's own."""

import base64
import os
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import numpy as np
import pytest
from support.models.tiny_bert import TinyBert, bert_states, pooled, tiny_ids
from support.models.tiny_models import tiny_llama
from support.processes.running_server import Running, started

from edgedec_apps.embedding import embed

openai = pytest.importorskip("openai")
ollama = pytest.importorskip("ollama")

pytestmark = pytest.mark.slow

TEXTS = ["Hello", "A longer text, which takes more tokens than the first. " * 4]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny embedding model that pools by the last token, and of one that writes texts."""
    folder: Path = tmp_path_factory.mktemp("embeddings")
    keys = {"qwen2.pooling_type": 3, "tokenizer.ggml.add_eos_token": True}
    embedder = tiny_llama(folder / "embed.gguf", architecture="qwen2", n_ctx_train=512, more=keys)
    with started(embedder, tiny_llama(folder / "chat.gguf", n_ctx_train=512), n_parallel=2) as server:
        yield server


@pytest.fixture(scope="module")
def ollama_client(server: Running) -> Iterator[Any]:
    """ollama's client, pointed at the server."""
    client = ollama.Client(host=server.url, timeout=60)
    yield client
    client.close()


def test_openai(client: Any, server: Running) -> None:
    """The vectors are the engine's to the bit, as base64 (the client's default) and to a float's text as numbers."""
    own = embed(server.engine, TEXTS)
    reply = client.embeddings.create(model="embed", input=TEXTS)
    assert np.array_equal(np.array([entry.embedding for entry in reply.data], np.float32), own)
    assert [entry.index for entry in reply.data] == [0, 1]
    assert reply.usage.prompt_tokens == sum(len(server.engine.prompt_ids(text)) for text in TEXTS)
    as_floats = client.embeddings.create(model="embed", input=TEXTS[0], encoding_format="float")
    assert np.array_equal(np.array(as_floats.data[0].embedding, np.float32), own[0])
    raw = server.client.post("/v1/embeddings", json={"input": TEXTS[0], "encoding_format": "base64"}).json()
    assert np.array_equal(np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4"), own[0])
    short = client.embeddings.create(model="embed", input=TEXTS, dimensions=8, user="u")
    assert np.array_equal(
        np.array([entry.embedding for entry in short.data], np.float32), embed(server.engine, TEXTS, dimensions=8)
    )
    ids = [list(server.engine.prompt_ids(text)) for text in TEXTS]
    for given, expected in ((ids, own), (ids[1], own[1:])):
        found = client.embeddings.create(model="embed", input=given)
        assert np.array_equal(np.array([entry.embedding for entry in found.data], np.float32), expected)


def test_ollama(ollama_client: Any, server: Running) -> None:
    """embed takes a text or several, and cuts long ones unless truncate is false; embeddings takes one."""
    own = embed(server.engine, TEXTS)
    reply = ollama_client.embed("embed", TEXTS)
    assert np.array_equal(np.array(reply.embeddings, np.float32), own)
    assert reply.prompt_eval_count == sum(len(server.engine.prompt_ids(text)) for text in TEXTS)
    one = ollama_client.embed("embed", TEXTS[0], dimensions=8, keep_alive="5m", options={"num_ctx": 512})
    assert np.array_equal(np.array(one.embeddings, np.float32), embed(server.engine, TEXTS[:1], dimensions=8))
    assert np.array_equal(np.array(ollama_client.embeddings("embed", TEXTS[0]).embedding, np.float32), own[0])
    long = "x" * 600
    ids = server.engine.tokenizer.encode(long)
    cut = embed(server.engine, [(*ids[:511], ids[-1])])  # the token that ends a text stays
    assert np.array_equal(np.array(ollama_client.embed("embed", long).embeddings, np.float32), cut)
    with pytest.raises(ollama.ResponseError, match=r"there is room for 512\. .*\(truncate of /api/embed\)"):
        ollama_client.embed("embed", long, truncate=False)


def test_a_text_that_is_too_long_is_in_the_field_input(client: Any) -> None:
    """As a text and as token ids; the message names no option that the interface lacks."""
    for given in ("x" * 600, [3] * 600):
        with pytest.raises(openai.BadRequestError) as caught:
            client.embeddings.create(model="embed", input=["a", given])
        assert (caught.value.param, caught.value.code) == ("input", "context_length_exceeded")
        assert "--method slide" not in str(caught.value)


def test_a_model_that_writes_is_asked_for_by_name(client: Any, ollama_client: Any, server: Running) -> None:
    """Its hidden states are pooled as its name says; without that it is refused, with the names that there are."""
    with pytest.raises(openai.BadRequestError, match="'NAME#mean'") as caught:
        client.embeddings.create(model="chat", input=TEXTS)
    assert caught.value.code == "not_an_embedding_model"
    client.completions.create(model="chat", prompt="x", max_tokens=1)
    for pooling in ("mean", "cls", "last"):
        own = embed(server.engine_of("chat"), TEXTS, pooling=pooling)
        reply = client.embeddings.create(model=f"chat#{pooling}", input=TEXTS)
        assert np.array_equal(np.array([entry.embedding for entry in reply.data], np.float32), own)
        assert reply.model == f"chat#{pooling}"
        assert np.array_equal(np.array(ollama_client.embed(f"chat#{pooling}", TEXTS).embeddings, np.float32), own)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="chat#max", input=TEXTS)


def test_an_embedding_model_writes_nothing(server: Running) -> None:
    """A request for a text is refused with the reason."""
    for path, fields in (("/v1/completions", {"prompt": "x"}), ("/api/generate", {"model": "embed", "prompt": "x"})):
        reply = server.client.post(path, json=fields)
        assert (reply.status_code, "is an embedding model" in reply.text) == (400, True)


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        ("/v1/embeddings", {}, "input is missing"),
        ("/v1/embeddings", {"input": ""}, "input is ''; it must be a text that is not empty"),
        ("/v1/embeddings", {"input": []}, "input holds 0 texts"),
        ("/v1/embeddings", {"input": ["x"] * 2049}, "input holds 2049 texts"),
        ("/v1/embeddings", {"input": [["x"]]}, "input[0] is ['x']"),
        (
            "/v1/embeddings",
            {"input": [[1], [1, 999]]},
            "text 1 holds the token id 999, which is outside the vocabulary",
        ),
        ("/v1/embeddings", {"input": {"text": "x"}}, "it must be a text"),
        ("/v1/embeddings", {"input": "x", "dimensions": 0}, "dimensions is 0"),
        ("/v1/embeddings", {"input": "x", "dimensions": 65}, "dimensions is 65; it must be 1 to 64"),
        ("/v1/embeddings", {"input": "x", "encoding_format": "hex"}, "encoding_format is 'hex'"),
        ("/v1/embeddings", {"input": "x" * 600}, "there is room for 512"),
        ("/v1/embeddings", {"input": ["x", "y", ""]}, "input[2] is ''"),
        ("/api/embed", {"model": "embed", "input": ["x", ""]}, "input[1] is ''"),
        ("/api/embed", {"model": "embed"}, "input is missing"),
        ("/api/embed", {"input": "x"}, "model is missing"),
        ("/api/embed", {"model": "embed", "input": "x", "truncate": 1}, "truncate is 1"),
        ("/api/embed", {"model": "embed", "input": "x", "options": {"mirostat": 1}}, "options.mirostat is 1"),
        ("/api/embeddings", {"model": "embed"}, "prompt is missing"),
    ],
)
def test_what_is_refused(server: Running, path: str, fields: dict[str, Any], word: str) -> None:
    """A malformed field is a 400 that names it."""
    reply = server.client.post(path, json=fields)
    assert reply.status_code == 400, reply.text
    assert word in reply.text


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny BERT and of a model that writes texts."""
    pytest.importorskip("llama_cpp")
    folder = tmp_path_factory.mktemp("encoder")
    bert, chat = TinyBert().write_gguf(folder / "bert.gguf"), tiny_llama(folder / "chat.gguf")
    with started(bert, chat, load_options={"runtime": "llamacpp"}, n_parallel=2) as server:
        yield server


def test_an_encoder(encoder: Running) -> None:
    """A BERT has the vectors of numpy at all three addresses; long texts are cut or refused, and it writes nothing."""
    weights, texts = TinyBert().weights(), ["some words", "of a text"]
    expected = np.array([pooled(bert_states(weights, tiny_ids(text)), "mean") for text in texts])
    with openai.OpenAI(base_url=f"{encoder.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        reply = client.embeddings.create(model="bert", input=texts)
        found = np.array([entry.embedding for entry in reply.data], np.float32)
        assert np.sum(found * expected, axis=1).min() > 0.99999
        assert reply.usage.prompt_tokens == sum(len(tiny_ids(text)) for text in texts)
        with pytest.raises(openai.BadRequestError, match="there is room for 128"):
            client.embeddings.create(model="bert", input="a " * 200)
        with pytest.raises(openai.BadRequestError, match="is an embedding model"):
            client.completions.create(model="bert", prompt="x")
        with pytest.raises(openai.BadRequestError, match="is an embedding model"):
            client.chat.completions.create(model="bert", messages=[{"role": "user", "content": "x"}])
        assert client.completions.create(model="chat", prompt="x", max_tokens=1).usage is not None
    client = ollama.Client(host=encoder.url, timeout=60)
    assert np.array_equal(np.array(client.embed("bert", texts).embeddings, np.float32), found)
    assert np.array_equal(np.array(client.embeddings("bert", texts[0]).embedding, np.float32), found[0])
    assert client.embed("bert", "a " * 200).prompt_eval_count == 128
    with pytest.raises(ollama.ResponseError, match="there is room for 128"):
        client.embed("bert", "a " * 200, truncate=False)
    client.close()


def test_an_encoder_is_unloaded_and_loaded_again(encoder: Running) -> None:
    """keep_alive unloads it, the next request loads it, and its capability is told."""
    client = ollama.Client(host=encoder.url, timeout=60)
    first = client.embed("bert", "a", keep_alive=0).embeddings
    deadline = monotonic() + 30
    while "bert" in [entry.model for entry in client.ps().models] and monotonic() < deadline:
        sleep(0.01)
    assert "bert" not in [entry.model for entry in client.ps().models]
    assert client.show("bert").capabilities == ["embedding"]
    assert client.embed("bert", "a").embeddings == first
    client.close()


def test_a_reranker_is_refused_by_name(server: Running) -> None:
    """A model that no runtime runs is a 501 that says what it is, and the other models are as they were."""
    models = Path(os.environ["EDGEDEC_CACHE"]) / "models"
    models.mkdir(parents=True, exist_ok=True)
    path = TinyBert().write_gguf(models / "reranker.gguf", pooling_type=4)
    try:
        reply = server.client.post("/v1/embeddings", json={"model": "reranker", "input": "x"})
    finally:
        path.unlink()
    assert (reply.status_code, reply.json()["error"]["code"]) == (501, "not_supported")
    assert "an embedding or reranker model (an encoder) (architecture 'bert')" in reply.json()["error"]["message"]
    assert server.client.post("/v1/embeddings", json={"input": "x"}).status_code == 200
