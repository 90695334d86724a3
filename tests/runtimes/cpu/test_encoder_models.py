"""Encoders on the cpu runtime: t5encoder embeds as float64 and llama.cpp do, and a vector is that of its text alone."""

from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from support.models.tiny_bert import TinyBert, pooled
from support.models.tiny_t5 import TinyT5, t5_logits

import edgedec
from edgedec.errors import CancelledError, CapabilityError, PromptTooLongError, RequestError, SessionError
from edgedec.load_options import LoadOptions
from edgedec.model import EncoderSession
from edgedec.progress import CancelToken
from edgedec_apps.embedding import embed
from edgedec_runtimes.cpu.runtime import Cpu

pytestmark = pytest.mark.slow
SMALL = TinyT5(n_ctx=512)
SHAPES = {
    "v1.1": SMALL,
    "first": replace(SMALL, n_encoder=2, gated=False, n_buckets=16, seed=1),
    "halves": replace(SMALL, n_head=4, dtype=np.float16, seed=2),
}
TEXTS = ["translate the small house", "a", "the " * 140, "the small house is " * 100]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return SMALL.write(tmp_path / "t5.gguf", {"t5encoder.pooling_type": 1}, kind="t5encoder")


@pytest.mark.parametrize("name", SHAPES)
def test_vectors(tmp_path: Path, name: str) -> None:
    """They are those of float64 and llama.cpp, with the same bits on two threads, and in any order of texts."""
    shape = SHAPES[name]
    path = shape.write(tmp_path / "t5.gguf", kind="t5encoder")
    with edgedec.load(path, n_threads=1, n_parallel=2) as engine:
        assert (engine.card.runtime, engine.card.pooling, engine.n_ctx) == ("cpu", None, 512)
        all_ids = [engine.prompt_ids(text) for text in TEXTS]
        found = {pooling: embed(engine, TEXTS, pooling=pooling) for pooling in ("mean", "cls", "last")}
    with edgedec.load(path, n_threads=2) as engine:
        assert np.array_equal(embed(engine, TEXTS[::-1], pooling="mean")[::-1], found["mean"])
    states = [t5_logits(shape, shape.weights(), ids, ()) for ids in all_ids]
    for pooling, vectors in found.items():
        expected = np.array([pooled(of_text, pooling) for of_text in states])
        assert np.sum(vectors * expected, axis=1).min() > 0.999999
    pytest.importorskip("llama_cpp")
    with edgedec.load(path, runtime="llamacpp") as engine:
        assert [engine.prompt_ids(text) for text in TEXTS] == all_ids
        assert np.sum(embed(engine, TEXTS, pooling="mean") * found["mean"], axis=1).min() > 0.999999


def test_what_is_refused(path: Path, tmp_path: Path) -> None:
    """Long texts, logits, forks, drafts, and other encoders; a cancelled or closed model does nothing more."""
    with edgedec.load(path, n_ctx=4096) as engine:
        assert (engine.n_ctx, engine.requests.n_prompt_max) == (512, 512)
        assert embed(engine, [(5,) * 512]).shape == (1, 128)
        with pytest.raises(
            PromptTooLongError, match=r"513 tokens; there is room for 512\. Shorten it, or cut .*cut_ids"
        ):
            embed(engine, [(5,) * 513])
        with pytest.raises(RequestError, match="load one that writes texts"):
            engine.generate("a")
        cancel = CancelToken()
        cancel.cancel()
        with pytest.raises(CancelledError):
            embed(engine, ["a"], cancel=cancel)
        session = cast(EncoderSession, engine.model.session(64))
        with pytest.raises(CapabilityError, match="has no logits"):
            session.forward(np.array([2], np.int32), n_past=0)
        with pytest.raises(CapabilityError):
            session.fork()
        with pytest.raises(RequestError):
            session.final_states(np.full(65, 5, np.int32))
        whole = session.final_states(np.full(64, 5, np.int32))
        assert (session.n_cached, len(session.save())) == (0, len(engine.model.session(64).save()))
        assert np.array_equal(session.final_states(np.full(64, 5, np.int32)), whole)
    with pytest.raises(SessionError):
        session.final_states(np.full(9, 5, np.int32))
    assert "an embedding or reranker model" in str(Cpu().accepts(TinyBert().write_gguf(tmp_path / "bert.gguf")))
    said = {"t5encoder.attention.relative_buckets_count": 8}
    for message, n, more in (
        ("30 ranges of distances are no", 30, {}),
        ("of 32 ranges of distances, expected 8", 32, said),
    ):
        odd = replace(SMALL, n_buckets=n).write(tmp_path / "odd.gguf", more, kind="t5encoder")
        assert message in str(Cpu().accepts(odd))


def test_a_forward_is_cancelled(path: Path) -> None:
    """While it runs, and the session reads the next text as before."""
    tokens = np.full(512, 5, np.int32)
    with Cpu().load(path, LoadOptions(n_threads=1)) as model:
        session = cast(EncoderSession, model.session(512))
        expected = session.final_states(tokens)
        model.stop.flag.value = 1  # type: ignore[attr-defined]
        with pytest.raises(CancelledError):
            session.final_states(tokens)
        assert np.array_equal(session.final_states(tokens), expected)


def test_the_memory_plan(path: Path, tmp_path: Path) -> None:
    """No logits; of the embeddings' matrix a text's rows are read from the file, as nothing multiplies by it."""
    options = LoadOptions(n_ctx=512, n_parallel=2, prompt_cache_bytes=1 << 30, cache_dir=tmp_path)
    terms = {term.name: term.n_bytes for term in Cpu().plan(path, options)}
    assert terms["KV cache"] == 2 * 512 * 3 * 2 * 3 * 32 * 2
    assert terms["states"] == 512 * 128 * 32
    assert not {"logits", "prompt cache"} & terms.keys()
    assert 0 <= terms["weights (tiles)"] - 3 * (4 * 128 * 96 + 3 * 128 * 256) * 4 < 108 * 128 * 4
