"""ModernBERT and EmbeddingGemma embed on the llamacpp runtime; headers that llama.cpp would end over are refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models import tiny_rankers
from support.models.gguf_writer import write_gguf
from support.models.tiny_rankers import modern_states, tiny_embedding_gemma, tiny_modern_bert

import edgedec
from edgedec.errors import ModelFormatError
from edgedec.gguf.file import read_gguf
from edgedec_apps.embedding import embed

pytest.importorskip("llama_cpp")

pytestmark = pytest.mark.slow

TEXTS = ["a", "some words of a text", "longer " * 12]


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
        found = embed(engine, TEXTS)
        assert np.array_equal(embed(engine, TEXTS[::-1])[::-1], found)
        all_ids = [engine.prompt_ids(text) for text in TEXTS]
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
        pooled = embed(engine, TEXTS).astype(np.float64)
    with edgedec.load(whole, n_threads=1) as engine:
        assert (engine.card.pooling, engine.card.n_embd) == ("mean", 64)
        found = embed(engine, TEXTS)
        assert np.array_equal(embed(engine, TEXTS[::-1])[::-1], found)
    expected = pooled @ tensors["dense_2.weight"].T @ tensors["dense_3.weight"].T
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
