"""edgedec rank."""

import json
from pathlib import Path

import pytest
from support.models.tiny_bert import TinyBert
from support.models.tiny_rankers import tiny_cross_encoder
from support.processes.command_line import run_here

import edgedec
from edgedec_apps.ranking import rank

pytestmark = pytest.mark.slow

QUERY = "where is the cat"
AUTO = ("--runtime", "auto", "--threads", "1")


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("llama_cpp")
    return tiny_cross_encoder(tmp_path_factory.mktemp("rank") / "bert.gguf")


def test_documents_from_lines_and_files(bert: Path, tmp_path: Path) -> None:
    """Lines of standard input, objects of JSON lines, and files; the best first, with where each comes from."""
    documents = ["the cat", "a dog", "x y z"]
    with edgedec.load(bert, n_threads=1) as engine:
        own = rank(engine, QUERY, documents)
        cut = rank(engine, QUERY, documents, max_document_tokens=2)
    lines = b'the cat\n\n{"text": "a dog", "id": 7}\n"x y z"\n'
    result = run_here("rank", bert, QUERY, *AUTO, stdin=lines)
    assert result.out.decode().splitlines() == [f"{own.scores[i]:9.4f}  {i + 1}  {documents[i]}" for i in own.order]
    files = [tmp_path / f"{i}.txt" for i in range(3)]
    for file, text in zip(files, documents, strict=True):
        file.write_text(text)
    found = json.loads(run_here("rank", bert, QUERY, *files, "--top", "2", "--json", "--normalize", *AUTO).out)
    assert found["results"] == [
        {"index": i, "score": own.normalized[i], "source": str(files[i]), "text": documents[i]} for i in own.order[:2]
    ]
    assert found["score_kind"] == "normalized logit"
    (jsonl := tmp_path / "some.jsonl").write_bytes(lines)
    found = json.loads(run_here("rank", bert, QUERY, jsonl, "--json", "--document-tokens", "2", *AUTO).out)
    assert [(each["source"], each["score"]) for each in found["results"]] == [
        (f"{jsonl}:{i + 1}", cut.scores[i]) for i in cut.order
    ]


def test_what_is_refused(bert: Path, tmp_path: Path) -> None:
    """No documents, no query, a document that is too long unless it may be cut, and models that can't rank."""
    run_here("rank", bert, QUERY, *AUTO).failed(40, "there are no documents")
    run_here("rank", bert, " ", *AUTO, stdin=b"a").failed(40, "query is ' '; it must have at least one character")
    run_here("rank", bert, QUERY, "--top", "0", *AUTO, stdin=b"a").failed(40, "--top is 0")
    run_here("rank", bert, QUERY, "--document-tokens", "0", *AUTO, stdin=b"a").failed(40, "--document-tokens is 0")
    run_here("rank", bert, QUERY, tmp_path / "none", *AUTO).failed(60, "can't be read")
    long = b"a " * 300
    run_here("rank", bert, QUERY, *AUTO, stdin=b"a\n" + long).failed(41, "document 1 with the query", "(--truncate)\n")
    assert run_here("rank", bert, QUERY, "--truncate", *AUTO, stdin=long).code == 0
    plain = TinyBert().write_gguf(tmp_path / "plain.gguf")
    run_here("rank", plain, QUERY, *AUTO, stdin=b"a").failed(51, "no head for ranking")


def test_info_says_what_it_is_for(bert: Path) -> None:
    """A reranker's report names the command, and programs see that it ranks."""
    assert "edgedec rank" in run_here("info", bert).out.decode()
    document = json.loads(run_here("info", bert, "--json").out)
    assert (document["ranks"], document["embeds"]) == (True, False)
