"""Ranking: scores of cross-encoders and of models that answer yes or no, against llama.cpp's own and plain numpy."""

import asyncio
from collections.abc import Callable, Iterator
from math import erf, exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny_bert import TinyBert, bert_states, tiny_ids
from support.models.tiny_models import tiny_llama
from support.models.tiny_rankers import (
    IM_END,
    IM_START,
    NO,
    RERANK,
    YES,
    head_tensors,
    llama_scores,
    modern_states,
    tiny_cross_encoder,
    tiny_modern_bert,
    tiny_qwen3_ranker,
)

import edgedec
from edgedec.api.async_api import in_thread
from edgedec.errors import (
    CancelledError,
    CapabilityError,
    ModelFormatError,
    OptionError,
    PromptTooLongError,
    RequestError,
)
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_kinds import is_ranker
from edgedec.progress import CancelToken, Progress
from edgedec_apps import ranking
from edgedec_apps.rank_prompts import pair_form, question_form
from edgedec_apps.ranking import Ranking, rank, sigmoid

pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.slow

QUERY = "where is the cat"
DOCUMENTS = ["the cat", "a dog sat", "", "x " * 20, "the the the", "the cat"]
Prompts = list[tuple[int, ...]]


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> Prompts:
    """What was read for the documents of the latest ranking."""
    seen: Prompts = []
    original = ranking.Work.__init__

    def noted(self: Any, engine: Any, prompts: Prompts, *rest: Any) -> None:
        seen[:] = prompts
        original(self, engine, prompts, *rest)

    monkeypatch.setattr(ranking.Work, "__init__", noted)
    return seen


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with the head and the keys of llama.cpp's converter."""
    return tiny_qwen3_ranker(tmp_path_factory.mktemp("qwen") / "qwen.gguf")


@pytest.fixture(scope="module")
def on_cpu(qwen: Path) -> Iterator[edgedec.Engine]:
    """The tiny Qwen3 on the cpu runtime."""
    with edgedec.load(qwen, runtime="cpu", draft="off", n_ctx=256, n_threads=1) as engine:
        yield engine


def checked(engine: edgedec.Engine) -> Ranking:
    """Return the ranking of DOCUMENTS, whose scores are the same alone, in another order and a second time."""
    found = rank(engine, QUERY, DOCUMENTS)
    assert rank(engine, QUERY, DOCUMENTS[::-1]).scores == found.scores[::-1]
    assert tuple(rank(engine, QUERY, [document]).scores[0] for document in DOCUMENTS) == found.scores
    assert rank(engine, QUERY, DOCUMENTS).scores == found.scores
    assert found.scores[0] == found.scores[-1]
    assert found.order == sorted(range(6), key=lambda i: (-found.scores[i], i))
    return found


@pytest.mark.parametrize("dense", [True, False])
def test_a_bert_scores_as_numpy_and_llama_cpp_do(*, dense: bool, tmp_path: Path, prompts: Prompts) -> None:
    """[CLS] query [SEP] document [SEP], the document of the second type; without the layer before the head a note."""
    path = tiny_cross_encoder(tmp_path / "bert.gguf", dense=dense)
    with edgedec.load(path, n_threads=1) as engine:
        found = checked(engine)
        rank(engine, QUERY, DOCUMENTS)
    assert (found.kind, bool(found.notes)) == ("logit", not dense)
    assert prompts[1] == (*tiny_ids(QUERY), *tiny_ids("a dog sat")[1:])
    assert found.n_tokens == tuple(map(len, prompts))
    head, weights, n_first = head_tensors(64, 0, dense=dense), TinyBert().weights(), len(tiny_ids(QUERY))
    for ids, score in zip(prompts, found.scores, strict=True):
        state = bert_states(weights, ids, n_first=n_first)[0]
        if dense:
            state = np.tanh(head["cls.weight"] @ state + head["cls.bias"])
        assert abs((head["cls.output.weight"] @ state + head["cls.output.bias"])[0] - score) < 0.02
    first, second = weights["embeddings.token_type_embeddings.weight"]
    rows = [weights["embeddings.word_embeddings.weight"][list(ids)] for ids in prompts]
    for each in rows:
        each[n_first:] += second - first
    np.testing.assert_allclose(found.scores, llama_scores(path, prompts, rows=rows)[:, 0], atol=2e-5)
    np.testing.assert_allclose(found.normalized, [1 / (1 + exp(-score)) for score in found.scores], rtol=1e-12)


@pytest.mark.parametrize("by_mean", [True, False])
def test_a_modern_bert_scores_as_numpy_and_llama_cpp_do(*, by_mean: bool, tmp_path: Path, prompts: Prompts) -> None:
    """The head reads the mean of the states or the first of them: a layer, GELU, a norm, a layer."""
    path = tiny_modern_bert(tmp_path / "modern.gguf", by_mean=by_mean)
    with edgedec.load(path, n_threads=1) as engine:
        found = checked(engine)
        rank(engine, QUERY, DOCUMENTS)
    gguf = read_gguf(path)
    tensors = {
        name: np.frombuffer(gguf.read_tensor_bytes(name), "<f4").reshape(tensor.shape[::-1])
        for name, tensor in gguf.tensors.items()
    }
    for ids, score in zip(prompts, found.scores, strict=True):
        states = modern_states(tensors, ids)
        x = tensors["cls.weight"] @ (states.mean(axis=0) if by_mean else states[0])
        x = np.array([0.5 * v * (1 + erf(v / 2**0.5)) for v in x])
        x = (x - x.mean()) / np.sqrt(x.var() + 1e-5) * tensors["cls.norm.weight"]
        assert abs((tensors["cls.output.weight"] @ x + tensors["cls.output.bias"])[0] - score) < 0.05
    np.testing.assert_allclose(found.scores, llama_scores(path, prompts)[:, 0], atol=5e-3)


@pytest.mark.parametrize("runtime", ["cpu", "llamacpp"])
def test_a_decoder_scores_by_its_answer(runtime: str, qwen: Path, prompts: Prompts) -> None:
    """The score is the probability of yes among yes and no: that of llama.cpp's head for ranking."""
    with edgedec.load(qwen, runtime=runtime, draft="off", n_ctx=256, n_threads=1) as engine:
        found = checked(engine)
        rank(engine, QUERY, DOCUMENTS)
        assert (found.kind, found.notes) == ("probability", ())
        np.testing.assert_allclose(found.scores, llama_scores(qwen, prompts, 2)[:, 0], atol=1e-4)
        logits = engine.session().forward(np.array(prompts[1], np.int32), n_past=0).logits[0]
        assert abs(found.scores[1] - sigmoid(float(logits[YES]) - float(logits[NO]))) < 1e-6


def test_a_head_in_place_of_the_output_matrix(tmp_path: Path, prompts: Prompts) -> None:
    """Where the converter left the output matrix out, the head is what scores, and not the embedding's rows."""
    path = tiny_qwen3_ranker(tmp_path / "untied.gguf", tied=False)
    with edgedec.load(path, runtime="cpu", draft="off", n_ctx=256, n_threads=1) as engine:
        found = checked(engine)
        rank(engine, QUERY, DOCUMENTS)
    np.testing.assert_allclose(found.scores, llama_scores(path, prompts, 2)[:, 0], atol=1e-4)
    with (
        edgedec.load(path, runtime="llamacpp", draft="off", n_ctx=256, n_threads=1) as engine,
        pytest.raises(CapabilityError, match="choose the cpu runtime"),
    ):
        rank(engine, QUERY, DOCUMENTS)


def test_a_file_without_a_head_gives_the_same_scores(on_cpu: edgedec.Engine, tmp_path: Path) -> None:
    """The template is then the model's chat template with Qwen3-Reranker's question, and a note says what it is."""
    bare = tiny_qwen3_ranker(tmp_path / "a.gguf", head=False, more={"tokenizer.chat_template.rerank": RERANK})
    chat = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "<|im_start|>assistant\n{% if not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    )
    chatting = tiny_qwen3_ranker(tmp_path / "b.gguf", head=False, more={"tokenizer.chat_template": chat})
    expected = rank(on_cpu, QUERY, DOCUMENTS)
    with edgedec.load(bare, runtime="cpu", draft="off", n_ctx=256, n_threads=1) as engine:
        found = rank(engine, QUERY, DOCUMENTS)
        assert (found.scores, found.notes) == (expected.scores, ())
    with edgedec.load(chatting, runtime="cpu", draft="off", n_ctx=512) as engine:
        found = rank(engine, QUERY, DOCUMENTS)
        assert "not say that its model was trained to rank" in found.notes[0]
        assert found.scores != expected.scores
        assert not is_ranker(read_gguf(chatting))
        with pytest.raises(RequestError, match=r"documents is .*; it must be a sequence"):
            rank(engine, QUERY, "one text")


def test_no_text_of_a_user_is_a_control_token_or_a_place(on_cpu: edgedec.Engine) -> None:
    """Control tokens and places that are spelled out in the query or a document stay text."""
    form = question_form(on_cpu.tokenizer, RERANK, "<|im_end|> {document}", 200)
    ids = form("the {query}<|im_start|>", None)
    assert (ids.count(IM_START), ids.count(IM_END)) == (3, 2)
    text = "user\n<Query>: <|im_end|> {document}\n<Document>: the {query}<|im_start|>"
    plain = on_cpu.tokenizer.encode(text, add_special=False)
    at = next(i for i in range(len(ids)) if list(ids[i : i + len(plain)]) == plain)
    assert (ids[at - 1], ids[at + len(plain)]) == (IM_START, IM_END)


def test_documents_that_do_not_fit(on_cpu: edgedec.Engine, tmp_path: Path, prompts: Prompts) -> None:
    """They are refused by their number, or cut where that is asked for; so is a query that leaves no room."""
    bert = tiny_cross_encoder(tmp_path / "bert.gguf")
    with edgedec.load(bert, n_threads=1) as encoder:
        for engine, most in ((on_cpu, 255), (encoder, 128)):
            with pytest.raises(PromptTooLongError, match="document 1 with the query"):
                rank(engine, QUERY, ["a", "b " * 300])
            with pytest.raises(PromptTooLongError, match="shorten the query"):
                rank(engine, "a " * 300, ["b"], max_document_tokens=5)
            cut = rank(engine, QUERY, ["a", "b " * 300], max_document_tokens=1000)
            assert cut.n_tokens[1] == most
            short = rank(engine, QUERY, ["a", "b c d e"], max_document_tokens=3)
            beginning = "b c d" if engine is encoder else "b c"
            assert short.scores[1] == rank(engine, QUERY, [beginning]).scores[0]
            assert short.n_tokens[1] - short.n_tokens[0] == 2
        form, n_first = pair_form(encoder.tokenizer, read_gguf(bert), "a", 127)
        assert n_first == 3
        assert form("b c d", 2) == (*tiny_ids("a"), *tiny_ids("b c")[1:])


@pytest.mark.parametrize(
    ("query", "documents", "cut", "error"),
    [
        ("", ["a"], None, RequestError),
        (" \n", ["a"], None, RequestError),
        (3, ["a"], None, RequestError),
        ("a", [], None, RequestError),
        ("a", [None], None, RequestError),
        ("a", ["b", 3], None, RequestError),
        ("a", ["b"], 0, OptionError),
        ("a", ["b"], True, OptionError),
        ("a", ["\ud800"], None, RequestError),
    ],
)
def test_what_is_refused(on_cpu: edgedec.Engine, query: Any, documents: Any, cut: Any, error: type[Exception]) -> None:
    """Each wrong argument by name."""
    with pytest.raises(error):
        rank(on_cpu, query, documents, max_document_tokens=cut)


def test_cancelling_and_progress(on_cpu: edgedec.Engine, tmp_path: Path) -> None:
    """Progress counts documents; whoever cancels in it gets CancelledError, and the next ranking is whole."""
    with edgedec.load(tiny_cross_encoder(tmp_path / "bert.gguf"), n_threads=1) as encoder:
        for engine in (on_cpu, encoder):
            expected, reports = rank(engine, QUERY, DOCUMENTS), list[Progress]()
            assert rank(engine, QUERY, DOCUMENTS, on_progress=reports.append).scores == expected.scores
            assert [each.done for each in reports if each.phase == "ranking"] == [1, 2, 3, 4, 5, 6]
            for after in (0, 1, 3):
                cancel = CancelToken()

                def stop(progress: Progress, cancel: CancelToken = cancel, after: int = after) -> None:
                    if progress.phase == "ranking" and progress.done == after:
                        cancel.cancel()

                if not after:
                    cancel.cancel()
                with pytest.raises(CancelledError):
                    rank(engine, QUERY, DOCUMENTS, cancel=cancel, on_progress=stop)
                assert rank(engine, QUERY, DOCUMENTS).scores == expected.scores

            def ranked(cancel: CancelToken, engine: edgedec.Engine = engine) -> Ranking:
                return rank(engine, QUERY, DOCUMENTS, cancel=cancel)

            assert asyncio.run(in_thread(ranked)).scores == expected.scores


def test_a_cap_changes_no_score(qwen: Path, on_cpu: edgedec.Engine) -> None:
    """Under a cap fewer documents share a forward, and one without room beside the others is read alone."""
    documents = [*DOCUMENTS, "the " * 170, *DOCUMENTS]
    expected = rank(on_cpu, QUERY, documents).scores
    with edgedec.load(qwen, runtime="cpu", draft="off", n_ctx=256, memory="300MB", n_parallel=2) as engine:
        assert rank(engine, QUERY, documents).scores == expected
        text = engine.generate("the", max_tokens=8, temperature=0).text
    assert on_cpu.generate("the", max_tokens=8, temperature=0).text == text


@pytest.mark.parametrize(
    ("make", "error", "word"),
    [
        (lambda path: TinyBert().write_gguf(path), CapabilityError, "no head for ranking"),
        (
            lambda path: tiny_cross_encoder(path, n_out=3, more={"bert.classifier.output_labels": ["a", "b", "c"]}),
            CapabilityError,
            "sorts texts into 3 classes",
        ),
        (lambda path: tiny_llama(path), CapabilityError, "no template for ranking"),
        (
            lambda path: tiny_llama(path, more={"tokenizer.chat_template.rerank": "{query} {document}"}),
            CapabilityError,
            "two answers of one token each",
        ),
        (
            lambda path: tiny_qwen3_ranker(path, more={"tokenizer.chat_template.rerank": "{query}"}),
            ModelFormatError,
            "expected {query} and {document}",
        ),
        (
            lambda path: tiny_qwen3_ranker(path, more={"tokenizer.chat_template.rerank": "{query}{document}" * 5}),
            ModelFormatError,
            "8 such places",
        ),
        (
            lambda path: tiny_qwen3_ranker(path, tied=False, answers=(YES, NO, YES)),
            CapabilityError,
            "3 classes, and ranking takes 2",
        ),
        (
            lambda path: tiny_qwen3_ranker(path, more={"qwen3.classifier.output_labels": ["yes"]}),
            CapabilityError,
            "two answers",
        ),
    ],
)
def test_models_that_can_not_rank(
    make: Callable[[Path], Path], error: type[Exception], word: str, tmp_path: Path
) -> None:
    """They are refused with the reason."""
    path = make(tmp_path / "m.gguf")
    runtime = "llamacpp" if read_gguf(path).metadata["general.architecture"] == "bert" else "cpu"
    with edgedec.load(path, runtime=runtime, draft="off", n_threads=1) as engine, pytest.raises(error, match=word):
        rank(engine, QUERY, DOCUMENTS)


def test_small_probabilities_stay_apart() -> None:
    """A sigmoid keeps its digits at both ends, and never overflows."""
    assert sigmoid(-60.0) == pytest.approx(exp(-60), rel=1e-12)
    assert (sigmoid(-1e6) < 1e-300, sigmoid(1e6), sigmoid(0.0)) == (True, 1.0, 0.5)
