"""edgedec rank and edgedec embed."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.models.tiny_bert import TinyBert, bert_states, pooled, tiny_ids
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


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT that pools by the mean."""
    pytest.importorskip("llama_cpp")
    return TinyBert().write_gguf(tmp_path_factory.mktemp("embed") / "bert.gguf")


def test_a_vector_a_line(encoder: Path) -> None:
    """Texts come from the arguments or from the lines of standard input; the vectors are numpy's."""
    weights, texts = TinyBert().weights(), ["some words", "of a text"]
    expected = np.array([pooled(bert_states(weights, tiny_ids(text)), "mean") for text in texts])
    for words, stdin in (
        ((*texts, "--runtime", "llamacpp"), b""),
        (("--runtime", "auto"), b"some words\n\nof a text\n"),
    ):
        result = run_here("embed", encoder, *words, stdin=stdin)
        found = np.array([json.loads(line) for line in result.out.splitlines()])
        assert np.sum(found * expected, axis=1).min() > 0.99999
    first = run_here("embed", encoder, "a", "--json", "--dimensions", "3", "--pooling", "cls", "--runtime", "auto")
    document = json.loads(first.out)
    assert (len(document["vectors"][0]), document["n_tokens"]) == (3, 3)


def test_a_model_that_writes(model: Path) -> None:
    """Its states are pooled as the option says: a vector of length 1."""
    result = run_here("embed", model, "a text", "--pooling", "mean", "--runtime", "cpu")
    (vector,) = (json.loads(line) for line in result.out.splitlines())
    assert np.linalg.norm(vector) == pytest.approx(1.0)


def test_what_embed_refuses(encoder: Path, model: Path) -> None:
    """No text, an empty one, one that is too long unless it may be cut, and a model that writes texts."""
    auto = ("--runtime", "auto")
    run_here("embed", encoder, *auto).failed(40, "there is no text")
    run_here("embed", encoder, "", *auto).failed(40, "an empty one")
    run_here("embed", encoder, "a " * 200, *auto).failed(
        41, "there is room for 128. Shorten it, or cut it to what fits (--truncate)\n"
    )
    run_here("embed", encoder, "a " * 100, "--context", "64", *auto).failed(
        41, "(--truncate), or load", "(--context 102)"
    )
    assert run_here("embed", encoder, "a " * 200, "--truncate", *auto).code == 0
    run_here("embed", encoder, "a", "--pooling", "max", *auto).failed(40, "mean, cls or last")
    run_here("embed", encoder, "a", "--dimensions", "65", *auto).failed(40, "it must be 1 to 64")
    run_here("embed", model, "a", *auto).failed(40, "does not say how", "give --pooling (mean, cls, last)")
    assert run_here("embed", model, "a", "--pooling", "mean", "--runtime", "cpu").code == 0
    refused = run_here("run", encoder, "a", *auto)
    refused.failed(40, "is an embedding model")
    assert "continued" not in refused.err
    run_here("bench", encoder, *auto).failed(40, "how fast a model writes")
    run_here("export", encoder, "--to", "onnx").failed(13, "the llamacpp runtime embeds texts")


def test_what_is_no_model_file_yet(tmp_path: Path) -> None:
    """A checkpoint's folder and another program's ONNX model are refused with what makes a model file."""
    folder = TinyBert().write_folder(tmp_path / "tiny")
    for command in (("info", folder), ("run", folder, "a"), ("embed", folder, "a")):
        run_here(*command).failed(12, f"edgedec export {folder} --to gguf")
    (folder / "model.onnx").write_bytes(b"onnx")
    for path in (folder, folder / "model.onnx"):
        run_here("info", path).failed(13, "`edgedec export` did not write", "edgedec export FOLDER --to gguf")
        run_here("embed", path, "a", "--runtime", "auto").failed(
            13, "`edgedec export` did not write", "edgedec export FOLDER --to gguf"
        )
    run_here("info", tmp_path / "none.onnx").failed(11, "none.onnx")
    for name, words in (("config.json", "expected one of bert, llama"), ("model.safetensors", "no .safetensors")):
        (folder / name).rename(folder / f"{name}.kept")
        (folder / "config.json").write_text('{"model_type": "other"}') if name == "config.json" else None
        run_here("export", folder, "--to", "gguf").failed(13 if name == "config.json" else 11, words)
        (folder / f"{name}.kept").rename(folder / name)


def test_info_says_what_an_encoder_is_for(encoder: Path, model: Path) -> None:
    """An embedding model's report has no defaults of sampling; a model that writes has them."""
    assert "edgedec embed" in (found := run_here("info", encoder).out.decode())
    assert "sampling" not in found
    assert "edgedec embed" not in run_here("info", model).out.decode()
    assert json.loads(run_here("info", encoder, "--json").out)["embeds"]
