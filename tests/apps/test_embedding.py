"""Embeddings: llama.cpp's vectors, whatever else is embedded, and by how many threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.tiny_models import tiny_llama
from support.models.tiny_quantized import ARCHITECTURES, write_tiny

import edgedec
from edgedec.errors import CancelledError, PromptTooLongError, RequestError
from edgedec.gguf.model_kinds import POOLINGS
from edgedec.progress import CancelToken
from edgedec_apps.embedding import embed

llama_cpp = pytest.importorskip("llama_cpp")

TEXTS = ["Hello", "A longer text, of which only a part fits into one forward. " * 3, "ünï"]
NUMBERS = {"mean": 1, "cls": 2, "last": 3}


def embedder(folder: Path, pooling: str, **more: Any) -> Path:
    """Write a tiny embedding model, whose texts end with a token of their own, as those of qwen3-embedding do."""
    keys = {"qwen2.pooling_type": NUMBERS[pooling], "tokenizer.ggml.add_eos_token": True}
    return tiny_llama(folder / f"{pooling}.gguf", architecture="qwen2", n_ctx_train=512, more=keys, **more)


@pytest.mark.slow
@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_vectors_are_llama_cpps(pooling: str, tmp_path: Path) -> None:
    """On all of our runtimes, for each pooling, of unit length, with the tokens around a text."""
    path = embedder(tmp_path, pooling)
    oracle = llama_cpp.Llama(str(path), embedding=True, n_ctx=512, n_batch=512, verbose=False)
    expected = np.array([oracle.embed(text, normalize=True) for text in TEXTS], np.float32)
    oracle.close()
    with edgedec.load(path, runtime="cpu", n_ctx=512, draft="off") as engine:
        assert engine.card.pooling == pooling
        ids = [engine.prompt_ids(text) for text in TEXTS]
        found = embed(engine, TEXTS)
    with edgedec.load(path, runtime="reference", n_ctx=512, draft="off") as engine:
        np.testing.assert_allclose(embed(engine, ids), found, atol=1e-4)
    with edgedec.load(path, runtime="llamacpp") as engine:
        assert (engine.card.pooling, engine.n_ctx, engine.card.n_embd) == (pooling, 512, 64)
        np.testing.assert_allclose(embed(engine, TEXTS), expected, atol=1e-3)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-3)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


def test_a_vector_depends_on_its_text_alone(tmp_path: Path) -> None:
    """Alone, among others, after other requests and beside them, a text's vector has the same bits."""
    path = embedder(tmp_path, "mean")
    with edgedec.load(path, runtime="cpu", n_ctx=512, n_parallel=2, draft="off") as engine:
        alone = np.concatenate([embed(engine, [text]) for text in TEXTS])
        assert np.array_equal(embed(engine, TEXTS), alone)
        assert np.array_equal(embed(engine, TEXTS[::-1]), alone[::-1])
        assert np.array_equal(embed(engine, [engine.prompt_ids(text) for text in TEXTS]), alone)
        with ThreadPoolExecutor(2) as pool:
            together = list(pool.map(lambda _: embed(engine, TEXTS), range(2)))
        assert all(np.array_equal(each, alone) for each in together)


def test_fewer_dimensions(tmp_path: Path) -> None:
    """The first numbers are kept, and scaled to unit length again."""
    with edgedec.load(embedder(tmp_path, "last"), runtime="cpu", n_ctx=512, draft="off") as engine:
        whole, cut = embed(engine, TEXTS), embed(engine, TEXTS, dimensions=8)
        expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(cut, expected, atol=1e-6)
        for dimensions in (0, 65):
            with pytest.raises(RequestError, match="it must be 1 to 64"):
                embed(engine, TEXTS, dimensions=dimensions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", ["lfm2", "lfm2moe", "granitehybrid", "falcon-h1", "gemma4", "nemotron_h", "mamba2"]
)
def test_models_with_layers_of_another_kind_embed(architecture: str, tmp_path: Path) -> None:
    """The vectors are llama.cpp's, wherever the file has its last norm."""
    path = write_tiny(tmp_path / "tiny.gguf", ARCHITECTURES[architecture])
    oracle = llama_cpp.Llama(str(path), embedding=True, pooling_type=1, n_ctx=64, n_batch=64, verbose=False)
    expected = np.array(oracle.embed("a b c d", normalize=True))
    oracle.close()
    with edgedec.load(path, runtime="cpu", n_ctx=64, draft="off") as engine:
        assert embed(engine, ["a b c d"], pooling="mean")[0] @ expected > 0.999


def test_a_model_that_writes_embeds_only_when_asked_to(tmp_path: Path) -> None:
    """Its pooling must be named; its texts are the same before and after, with the KV cache lost in between."""
    with edgedec.load(tiny_llama(tmp_path / "chat.gguf"), runtime="cpu", n_ctx=256, draft="off") as engine:
        with pytest.raises(RequestError, match="does not say how its hidden states become one vector"):
            embed(engine, ["x"])
        with pytest.raises(RequestError, match="it must be mean, cls, last or None"):
            embed(engine, ["x"], pooling="max")  # type: ignore[arg-type]
        text = engine.generate("Once", max_tokens=8, seed=1).text
        first, again = embed(engine, ["Once"], pooling="mean"), embed(engine, ["Once"], pooling="mean")
        assert np.array_equal(first, again)
        assert engine.generate("Once", max_tokens=8, seed=1).text == text


def test_an_embedding_model_writes_nothing(tmp_path: Path) -> None:
    """It refuses to write, with a reason."""
    with edgedec.load(embedder(tmp_path, "last"), runtime="cpu", n_ctx=512, draft="off") as engine:
        with pytest.raises(RequestError, match="is an embedding model"):
            engine.generate("x")
        assert embed(engine, [""]).shape == (1, 64)  # the tokens around an empty text
        refused: list[tuple[Any, type[Exception]]] = [((), RequestError), ((999,), RequestError)]
        refused.append(("x" * 600, PromptTooLongError))
        for text, error in refused:
            with pytest.raises(error):
                embed(engine, ["x", text])
        cancel = CancelToken()
        cancel.cancel()
        with pytest.raises(CancelledError):
            embed(engine, ["x"], cancel=cancel)
        assert embed(engine, []).shape == (0, 64)
