"""Encoders on the llamacpp runtime: their vectors are those of plain numpy; headers that would end it are refused."""

import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from support.models import tiny_rankers
from support.models.gguf_writer import write_gguf
from support.models.tiny_bert import TinyBert, bert_states, pooled, tiny_ids
from support.models.tiny_rankers import modern_states, tiny_embedding_gemma, tiny_modern_bert
from support.models.tiny_t5 import TinyT5, t5_logits

import edgedec
from edgedec.errors import (
    CancelledError,
    CapabilityError,
    EdgedecError,
    MemoryCapError,
    ModelFormatError,
    OptionError,
    PromptTooLongError,
    RequestError,
    SessionError,
    UnsupportedModelError,
)
from edgedec.gguf.file import read_gguf
from edgedec.load_options import LoadOptions
from edgedec.memory.shedding import margin_bytes
from edgedec.model import EncoderSession
from edgedec.progress import CancelToken
from edgedec_apps.embedding import embed
from edgedec_apps.prompt_cache import load_prompt_cache, save_prompt_cache
from edgedec_runtimes.llamacpp.encoder import typed_rows
from edgedec_runtimes.llamacpp.runtime import LlamaCpp

pytest.importorskip("llama_cpp")


pytestmark = pytest.mark.slow


TEXTS = ["a", "some words of a text", "longer " * 15]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT that pools by the mean."""
    return TinyBert().write_gguf(tmp_path_factory.mktemp("bert") / "bert.gguf")


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last")])
def test_the_vectors_are_those_of_numpy(number: int, pooling: str, tmp_path: Path) -> None:
    """For each pooling that a file names; the tokens are the pieces of the words between [CLS] and [SEP]."""
    bert = TinyBert(seed=number)
    weights = bert.weights()
    with edgedec.load(bert.write_gguf(tmp_path / "bert.gguf", pooling_type=number)) as engine:
        assert (engine.card.runtime, engine.card.pooling, engine.n_ctx) == ("llamacpp", pooling, 128)
        assert [list(engine.prompt_ids(text)) for text in TEXTS] == [tiny_ids(text) for text in TEXTS]
        found = embed(engine, TEXTS)
        expected = np.array([pooled(bert_states(weights, tiny_ids(text)), pooling) for text in TEXTS])
        assert np.sum(found * expected, axis=1).min() > 0.99999
        np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
        other = embed(engine, TEXTS, pooling="cls", dimensions=8)
        first = np.array([bert_states(weights, tiny_ids(text))[0, :8] for text in TEXTS])
        first /= np.linalg.norm(first, axis=1, keepdims=True)
        np.testing.assert_allclose(other, first, atol=2e-3)


def test_the_encoder_of_a_t5(tmp_path: Path) -> None:
    """Its vectors are those of float64, in which each token sees all; a header that would end llama.cpp is refused."""
    t5, texts = TinyT5(), ["translate the small house", "a", "the " * 40]
    with edgedec.load(t5.write(tmp_path / "t5.gguf", kind="t5encoder"), runtime="llamacpp") as engine:
        vectors = embed(engine, texts, pooling="mean")
        states = [t5_logits(t5, t5.weights(), engine.prompt_ids(text), ()) for text in texts]
    expected = np.array([pooled(of_text, "mean") for of_text in states])
    assert np.sum(vectors * expected, axis=1).min() > 0.99999
    odd = replace(t5, n_buckets=30).write(tmp_path / "odd.gguf", kind="t5encoder")
    assert "there are 30 ranges of distances" in str(LlamaCpp().accepts(odd))


def test_a_vector_depends_on_its_text_alone(model: Path) -> None:
    """Alone, among others and beside other threads, a text's vector has the same bits."""
    with edgedec.load(model, n_parallel=2) as engine:
        alone = np.concatenate([embed(engine, [text]) for text in TEXTS])
        together: list[np.ndarray[tuple[int, ...], np.dtype[np.float32]]] = []
        threads = [threading.Thread(target=lambda: together.append(embed(engine, TEXTS))) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert np.array_equal(embed(engine, TEXTS[::-1])[::-1], alone)
        assert [np.array_equal(each, alone) for each in together] == [True, True]


def test_a_file_without_a_pooling(tmp_path: Path) -> None:
    bert = TinyBert()
    for pooling_type in (None, 0):
        with edgedec.load(bert.write_gguf(tmp_path / "bert.gguf", pooling_type=pooling_type)) as engine:
            with pytest.raises(RequestError, match="or give pooling"):
                embed(engine, ["a"])
            assert embed(engine, ["a"], pooling="mean").shape == (1, 64)
            with pytest.raises(RequestError, match="load one that writes texts"):
                engine.generate("a")


def test_a_text_that_does_not_fit(model: Path) -> None:
    """It is refused, or cut where that is asked for; no context is longer than the positions that the model has."""
    with edgedec.load(model, n_ctx=4096) as engine:
        assert engine.n_ctx == 128
        assert (engine.requests.n_prompt_max, len(engine.prompt_ids("a " * 126))) == (128, 128)
        assert embed(engine, ["a " * 126]).shape == (1, 64)
        says = r"129 tokens; there is room for 128\. Shorten it, or cut .*cut_ids.$"
        with pytest.raises(PromptTooLongError, match=says):
            embed(engine, ["a " * 127])
        cut = engine.requests.cut_ids("a " * 200)
        assert (len(cut), cut[0], cut[-1], cut[:3]) == (128, 2, 3, engine.requests.cut_ids("a a")[:3])
        assert embed(engine, [cut]).shape == (1, 64)
        assert engine.requests.cut_ids("a") == engine.prompt_ids("a")
        for ids, error in (((), RequestError), ((56,) * 129, PromptTooLongError), ((999,), RequestError)):
            with pytest.raises(error):
                embed(engine, [ids])


def test_cancelling_and_closing(model: Path, tmp_path: Path) -> None:
    """A cancelled work raises; after close() there is no more; an empty prompt cache is saved and loaded."""
    cancel = CancelToken()
    cancel.cancel()
    with edgedec.load(model) as engine:
        with pytest.raises(CancelledError):
            embed(engine, ["a"], cancel=cancel)
        save_prompt_cache(engine, tmp_path / "cache")
        assert load_prompt_cache(engine, tmp_path / "cache") == 0
        session = engine.session()
    with pytest.raises(SessionError):
        embed(engine, ["a"])
    with pytest.raises(SessionError):
        cast(EncoderSession, session).final_states(np.array([2, 3], np.int32))


def test_the_runtime_alone(model: Path) -> None:
    """It refuses contexts beyond the positions, forwards, forks, and states of a model that writes."""
    with LlamaCpp().load(model, LoadOptions(n_ctx=4096)) as loaded:
        with pytest.raises(OptionError, match="1 to 128"):
            loaded.session(129)
        session = loaded.session(64)
        with pytest.raises(CapabilityError, match="has no logits"):
            session.forward(np.array([2], np.int32), n_past=0)
        with pytest.raises(CapabilityError):
            session.fork()
        assert (session.exact_rows(0, measure=2), session.n_cached) == ((1, None), 0)


def test_the_plan_holds_what_the_longest_text_takes(model: Path) -> None:
    """The states, and the logits that llama.cpp has room for; nothing for a KV cache or a probe."""
    terms = {term.name: term.n_bytes for term in LlamaCpp().plan(model, LoadOptions())}
    assert terms["states"] == 4 * 128 * (57 + 64)
    assert not {"KV cache", "logits", "first run"} & terms.keys()
    with edgedec.load(model, memory="400MB", grammars=True) as engine:
        assert "vocabulary of grammars" not in {term.name for term in engine.plan.terms}
        assert engine.plan.fits


@pytest.mark.parametrize("n_ctx", [256, 128])
def test_a_cap_shortens_the_context(n_ctx: int, tmp_path: Path) -> None:
    """As the last step down, unless the context was asked for by name."""
    path = TinyBert(n_layer=8, n_embd=256, n_ff=1024, n_ctx=512).write_gguf(tmp_path / "bert.gguf")
    sizes = []
    for n in (n_ctx, 2 * n_ctx):
        with edgedec.load(path, memory="400MB", n_ctx=n) as engine:
            sizes.append(sum(term.n_bytes for term in engine.plan.terms if term.name != "reserve"))
    between = sum(sizes) // 2
    cap_bytes = between + next(n for n in range(0, 10**7, 1000) if margin_bytes(between + n) <= n)
    with edgedec.load(path, memory=cap_bytes) as engine:
        assert engine.n_ctx == n_ctx
    with pytest.raises(MemoryCapError):
        edgedec.load(path, memory=cap_bytes, n_ctx=512)


@pytest.mark.parametrize(
    ("more", "error", "word"),
    [
        ({"bert.attention.key_length": 32}, ModelFormatError, "a value 16"),
        ({"bert.attention.layer_norm_epsilon": 2.0}, ModelFormatError, "layer_norm_epsilon"),
        ({"bert.context_length": 512}, UnsupportedModelError, "does not load"),
        ({"bert.block_count": 3}, UnsupportedModelError, "does not load"),
        ({"tokenizer.ggml.seperator_token_id": 900}, ModelFormatError, "seperator"),
    ],
)
def test_a_file_that_contradicts_itself(
    more: dict[str, object], error: type[EdgedecError], word: str, tmp_path: Path
) -> None:
    """It is refused before llama.cpp could fail on it."""
    path = TinyBert().write_gguf(tmp_path / "bert.gguf", more=more)
    with pytest.raises(error, match=word):
        edgedec.load(path, runtime="llamacpp")


def test_only_berts_with_two_token_types_read_pairs_in_another_way(tmp_path: Path) -> None:
    """With one type, or with a tokenizer that gives no types, the tokens themselves are read."""
    bert = TinyBert()
    weights, name = bert.weights(), "token_types.weight"
    types = weights["embeddings.token_type_embeddings.weight"]
    rows = typed_rows(read_gguf(bert.write_gguf(tmp_path / "two.gguf")))
    assert rows is not None
    expected = weights["embeddings.word_embeddings.weight"][[2, 9, 3, 9]]
    expected[3:] += types[1] - types[0]
    assert np.array_equal(rows(np.array([2, 9, 3, 9], np.int32), 3), expected)
    assert typed_rows(read_gguf(bert.write_gguf(tmp_path / "one.gguf", tensors={name: types[:1]}))) is None
    assert typed_rows(read_gguf(bert.write_gguf(tmp_path / "t5.gguf", more={"tokenizer.ggml.model": "t5"}))) is None


def test_token_types_that_llama_cpp_could_not_add(tmp_path: Path) -> None:
    """llama.cpp would end the process on them, so they must be F32."""

    class HalfTypes(TinyBert):
        def weights(self) -> dict[str, Any]:
            name = "embeddings.token_type_embeddings.weight"
            found = TinyBert.weights(self)
            return found | {name: found[name].astype(np.float16)}

    path = HalfTypes().write_gguf(tmp_path / "bert.gguf")
    with pytest.raises(ModelFormatError, match=r"token_types\.weight is of the type F16"):
        edgedec.load(path, runtime="llamacpp")


SHORTER = ["a", "some words of a text", "longer " * 12]


def tensors_of(path: Path) -> dict[str, Any]:
    """Return the tensors of a file of float32."""
    gguf = read_gguf(path)
    return {
        name: np.frombuffer(gguf.read_tensor_bytes(name), "<f4").reshape(tensor.shape[::-1])
        for name, tensor in gguf.tensors.items()
    }


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls")])
def test_modern_bert_embeds_as_numpy_does(number: int, pooling: str, tmp_path: Path) -> None:
    """With windows in two of three layers; a vector depends on its text alone."""
    path = tiny_modern_bert(tmp_path / "modern.gguf", pooling_type=number)
    tensors = tensors_of(path)
    with edgedec.load(path, n_threads=1) as engine:
        assert (engine.card.runtime, engine.card.pooling, engine.n_ctx) == ("llamacpp", pooling, 128)
        found = embed(engine, SHORTER)
        assert np.array_equal(embed(engine, SHORTER[::-1])[::-1], found)
        all_ids = [engine.prompt_ids(text) for text in SHORTER]
    for vector, ids in zip(found, all_ids, strict=True):
        states = modern_states(tensors, ids)
        expected = states.mean(axis=0) if pooling == "mean" else states[0]
        assert vector @ expected / np.linalg.norm(expected) > 0.9995


def test_embedding_gemma_has_its_dense_layers(tmp_path: Path) -> None:
    """The layers behind the pooling are part of a vector: those of the file without them, multiplied."""
    whole = tiny_embedding_gemma(tmp_path / "whole.gguf")
    bare = tiny_embedding_gemma(tmp_path / "bare.gguf", dense=None)
    tensors = tensors_of(whole)
    with edgedec.load(bare, n_threads=1) as engine:
        without = embed(engine, SHORTER).astype(np.float64)
    with edgedec.load(whole, n_threads=1) as engine:
        assert (engine.card.pooling, engine.card.n_embd) == ("mean", 64)
        found = embed(engine, SHORTER)
        assert np.array_equal(embed(engine, SHORTER[::-1])[::-1], found)
    expected = without @ tensors["dense_2.weight"].T @ tensors["dense_3.weight"].T
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    assert np.sum(found * expected, axis=1).min() > 0.9999


NAME = "gemma-embedding"


@pytest.mark.parametrize(
    ("more", "lost", "word"),
    [
        ({f"{NAME}.dense_2_feat_in": 32}, (), "dense_2_feat_in is 32"),
        ({f"{NAME}.dense_3_feat_out": 32}, (), "dense_3_feat_out is 32"),
        ({}, ("dense_3.weight",), "give 96 numbers"),
        ({}, ("dense_2.weight",), "dense_3.weight has the shape"),
        ({f"{NAME}.attention.value_length": 32}, (), "a value 32"),
        ({f"{NAME}.attention.sliding_window": 0}, (), "no sliding window"),
        ({f"{NAME}.attention.sliding_window_pattern": 0}, (), "layers of both kinds"),
        ({f"{NAME}.attention.sliding_window_pattern": 6}, (), "layers of both kinds"),
    ],
)
def test_what_llama_cpp_would_end_the_process_over(
    more: Mapping[str, Any], lost: tuple[str, ...], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a ModelFormatError that says what was expected."""

    def written(path: Path, metadata: dict[str, Any], tensors: dict[str, Any]) -> Path:
        kept = {name: tensor for name, tensor in tensors.items() if name not in lost}
        return write_gguf(path, metadata | dict(more), kept)

    monkeypatch.setattr(tiny_rankers, "write_gguf", written)
    path = tiny_embedding_gemma(tmp_path / "gemma.gguf")
    with pytest.raises(ModelFormatError, match=word):
        edgedec.load(path, runtime="llamacpp")
