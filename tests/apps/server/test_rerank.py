"""Reranking over HTTP: the engine's scores in the forms of Jina, Cohere and Text Embeddings Inference."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.models.tiny_rankers import tiny_cross_encoder, tiny_qwen3_ranker
from support.processes.running_server import Running, started

from edgedec_apps.ranking import rank

pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.slow

QUERY, DOCUMENTS = "where is the cat", ["the cat", "a dog sat", "", "the the the"]
ASKED = {"query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A server of a tiny cross-encoder."""
    path = tiny_cross_encoder(tmp_path_factory.mktemp("rerank") / "bert.gguf", dense=False)
    with started(path, load_options={"runtime": "llamacpp", "n_threads": 1}) as running:
        yield running


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/v1/reranking", "/reranking"])
def test_the_scores_are_the_engines(running: Running, path: str) -> None:
    """The best first, raw; the answer says what kind of number a score is, and what to know of it."""
    own = rank(running.engine, QUERY, DOCUMENTS)
    reply = running.client.post(path, json=ASKED).json()
    expected = [{"index": i, "relevance_score": own.scores[i]} for i in own.order]
    assert reply["results"] == expected
    assert reply["usage"] == {"prompt_tokens": sum(own.n_tokens), "total_tokens": sum(own.n_tokens)}
    assert (reply["score_kind"], reply["object"], reply["model"]) == ("logit", "list", "bert")
    assert "the pooler" in reply["notes"][0]


def test_options_of_the_answer(running: Running) -> None:
    """top_n, the documents' texts, objects as documents, normalized scores and a cut."""
    own = rank(running.engine, QUERY, DOCUMENTS, max_document_tokens=2)
    objects = [{"text": text} for text in DOCUMENTS]
    more = {"top_n": 2, "return_documents": True, "normalize": True, "max_tokens_per_doc": 2, "model": "bert"}
    reply = running.client.post("/v1/rerank", json={"query": QUERY, "documents": objects} | more).json()
    assert reply["results"] == [
        {"index": i, "relevance_score": own.normalized[i], "document": {"text": DOCUMENTS[i]}} for i in own.order[:2]
    ]
    assert reply["score_kind"] == "normalized logit"


@pytest.mark.parametrize("raw", [None, True, False])
def test_the_form_of_text_embeddings_inference(running: Running, *, raw: bool | None) -> None:
    """A list alone, whose scores are normalized unless raw ones are asked for."""
    own = rank(running.engine, QUERY, DOCUMENTS)
    asked = {"query": QUERY, "texts": DOCUMENTS, "raw_scores": raw, "return_text": True, "truncate": True}
    reply = running.client.post("/rerank", json=asked).json()
    scores = own.scores if raw else own.normalized
    assert reply == [{"index": i, "score": scores[i], "text": DOCUMENTS[i]} for i in own.order]


def test_with_the_client_of_cohere(running: Running) -> None:
    """Both of its versions."""
    cohere: Any = pytest.importorskip("cohere")
    own = rank(running.engine, QUERY, DOCUMENTS[:2])
    for client in (cohere.ClientV2, cohere.Client):
        with httpx.Client() as http:
            asking = client("none", base_url=running.url, httpx_client=http)
            found = asking.rerank(model="bert", query=QUERY, documents=DOCUMENTS[:2], top_n=1)
        best = own.order[0]
        assert [(each.index, each.relevance_score) for each in found.results] == [(best, own.scores[best])]


def test_side_by_side(running: Running) -> None:
    """Requests at the same time get the scores that each gets alone."""
    queries = ["a", "the cat", "dog", "x y z"]
    alone = [rank(running.engine, query, DOCUMENTS).scores for query in queries]

    def ask(query: str) -> tuple[float, ...]:
        results = running.client.post("/v1/rerank", json=ASKED | {"query": query}).json()["results"]
        return tuple(each["relevance_score"] for each in sorted(results, key=lambda each: each["index"]))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, queries)) == alone


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": "a"}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": ["a"] * 2049}, "documents"),
        ({"documents": ["a", 3]}, "documents[1]"),
        ({"documents": [{"title": "a"}]}, "documents[0]"),
        ({"documents": ["a " * 300]}, "documents"),
        ({"query": "a " * 300}, "query"),
        ({"top_n": 0}, "top_n"),
        ({"max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"normalize": "yes"}, "normalize"),
        ({"normalize": True, "raw_scores": True}, "normalize"),
        ({"truncation_direction": "left"}, "truncation_direction"),
        ({"texts": ["a"]}, "documents"),
        ({"model": "no-such"}, "model"),
    ],
)
def test_refusals_name_the_field(running: Running, change: dict[str, Any], param: str) -> None:
    """Each is a 4xx, and the server goes on."""
    reply = running.client.post("/v1/rerank", json=ASKED | change)
    assert (400 <= reply.status_code < 500, reply.json()["error"]["param"]) == (True, param)
    assert running.client.post("/v1/rerank", json=ASKED).status_code == 200


def test_a_field_of_cohere_without_effect_is_named(running: Running) -> None:
    """The header says which fields were ignored."""
    reply = running.client.post("/v1/rerank", json=ASKED | {"max_chunks_per_doc": 3, "rank_fields": ["text"]})
    assert set(reply.headers["x-edgedec-ignored"].split(", ")) == {"rank_fields", "max_chunks_per_doc"}


def test_a_decoder_ranks_beside_texts(tmp_path: Path) -> None:
    """Rankings and texts of one model at the same time are those of each alone."""
    with started(tiny_qwen3_ranker(tmp_path / "qwen.gguf"), n_parallel=2, load_options={"n_ctx": 256}) as running:
        own = rank(running.engine, QUERY, DOCUMENTS)
        text = {"prompt": "the cat", "max_tokens": 24, "temperature": 0}
        alone = running.client.post("/v1/completions", json=text).json()["choices"][0]["text"]
        with ThreadPoolExecutor(4) as threads:
            rankings = [threads.submit(running.client.post, "/v1/rerank", json=ASKED) for _ in range(3)]
            texts = [threads.submit(running.client.post, "/v1/completions", json=text) for _ in range(3)]
            for each in rankings:
                results = each.result().json()["results"]
                assert [(r["index"], r["relevance_score"]) for r in results] == [(i, own.scores[i]) for i in own.order]
            assert {each.result().json()["choices"][0]["text"] for each in texts} == {alone}
