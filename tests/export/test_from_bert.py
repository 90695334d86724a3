"""BERT checkpoints to GGUF: the vectors are those of the checkpoint, computed with numpy."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.hf_checkpoints import TinyHF, safetensors_bytes, write_checkpoint
from support.models.tiny_bert import TinyBert, bert_states, pooled, tiny_ids, tokenizer_json
from support.models.tiny_rankers import head_tensors, tiny_cross_encoder

import edgedec
from edgedec.errors import EdgedecError, ModelFormatError, ModelNotFoundError, UnsupportedModelError
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_kinds import is_ranker
from edgedec_apps.embedding import embed
from edgedec_apps.ranking import rank
from edgedec_export.to_gguf import export_gguf

TEXTS = ["a", "some words of a text", "longer " * 15]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("type_name", "least", "pooling"),
    [
        (None, 0.99999, "mean_tokens"),
        (None, 0.99999, "cls_token"),
        ("F16", 0.9999, "mean_tokens"),
        ("Q8_0", 0.999, "mean_tokens"),
        ("Q4_0", 0.9, "cls_token"),
    ],
)
def test_the_vectors_are_the_checkpoints(type_name: str | None, least: float, pooling: str, tmp_path: Path) -> None:
    """For the types of weights; the last of them is made by llama.cpp's quantizer."""
    pytest.importorskip("llama_cpp")
    bert = TinyBert(n_ff=128)
    folder = bert.write_folder(tmp_path / "tiny", pooling)
    path = export_gguf(folder, tmp_path / "tiny.gguf", type_name=type_name)
    name = pooling.partition("_")[0]
    expected = np.array([pooled(bert_states(bert.weights(), tiny_ids(text)), name) for text in TEXTS])
    with edgedec.load(path) as engine:
        assert (engine.card.pooling, engine.card.name) == (name, "tiny")
        assert [list(engine.prompt_ids(text)) for text in TEXTS] == [tiny_ids(text) for text in TEXTS]
        assert list(engine.prompt_ids("B é ?")) == [2, 6, 9, 1, 3]  # capitals and accents go; what is unknown is [UNK]
        assert np.sum(embed(engine, TEXTS) * expected, axis=1).min() > least


def test_it_is_what_llama_cpps_converter_writes(tmp_path: Path) -> None:
    """The metadata and tensors of the test's own writer, which has the names of llama.cpp's converter."""
    bert = TinyBert()
    ours = read_gguf(export_gguf(bert.write_folder(tmp_path / "tiny"), tmp_path / "ours.gguf"))
    theirs = read_gguf(bert.write_gguf(tmp_path / "theirs.gguf"))
    assert {name: (t.shape, t.type) for name, t in ours.tensors.items()} == {
        name: (t.shape, t.type) for name, t in theirs.tensors.items()
    }
    for name in theirs.tensors:
        assert ours.read_tensor_bytes(name) == theirs.read_tensor_bytes(name)
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.token_type"):
        assert list(ours.metadata[key]) == list(theirs.metadata[key])  # type: ignore[arg-type]
    plain = {key: value for key, value in theirs.metadata.items() if isinstance(value, bool | int | float)}
    assert plain.items() <= ours.metadata.items()


@pytest.mark.slow
@pytest.mark.parametrize(("type_name", "most"), [(None, 1e-6), ("F16", 0.02), ("Q8_0", 0.2)])
def test_a_checkpoint_of_a_cross_encoder_ranks(type_name: str | None, most: float, tmp_path: Path) -> None:
    """Its head is written as llama.cpp's converter names it, with the pooler that this one leaves out."""
    pytest.importorskip("llama_cpp")
    head = head_tensors(64, 0)
    places = {"cls.output": "classifier", "cls": "bert.pooler.dense"}
    named = {f"{places[name.rpartition('.')[0]]}.{name.rpartition('.')[2]}": each for name, each in head.items()}
    folder = TinyBert().write_folder(tmp_path / "tiny", architectures=["BertForSequenceClassification"])
    raw = {name: ("F32", each.shape, each.tobytes()) for name, each in {**TinyBert().weights(), **named}.items()}
    (folder / "model.safetensors").write_bytes(safetensors_bytes(raw))
    path = export_gguf(folder, tmp_path / "tiny.gguf", type_name=type_name)
    assert is_ranker(read_gguf(path))
    ranked = []
    for file in (path, tiny_cross_encoder(tmp_path / "expected.gguf")):
        with edgedec.load(file, n_threads=1) as engine:
            ranking = rank(engine, "a question", ["an answer", "another one", ""])
            ranked.append((ranking.scores, ranking.notes))
    np.testing.assert_allclose(ranked[0][0], ranked[1][0], atol=most)
    assert ranked[0][1] == ranked[1][1] == ()


def test_without_modules_no_pooling_is_written(tmp_path: Path) -> None:
    """A checkpoint that is not of sentence-transformers does not say how it pools."""
    folder = TinyBert().write_folder(tmp_path / "tiny")
    (folder / "modules.json").unlink()
    made = read_gguf(export_gguf(folder, tmp_path / "tiny.gguf"))
    assert "bert.pooling_type" not in made.metadata


def changed(part: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer.json with other parts."""
    return tokenizer_json() | part


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        ({}, {}),
        ({"strip_accents": True}, {}),
        ({"lowercase": False}, {"lowercase": False, "strip_accents": False}),
        ({"lowercase": False, "strip_accents": True}, {"lowercase": False, "strip_accents": True}),
        ({"strip_accents": False}, {"lowercase": True, "strip_accents": False}),
    ],
)
def test_capital_letters_and_accents_of_a_tokenizer(
    rules: dict[str, Any], expected: dict[str, bool], tmp_path: Path
) -> None:
    """What becomes of them is written where it is not what becomes of them in most files."""
    folder = TinyBert().write_folder(tmp_path / "tiny")
    (folder / "tokenizer.json").write_text(json.dumps(changed({"normalizer": {"type": "BertNormalizer"} | rules})))
    made = read_gguf(export_gguf(folder, tmp_path / "tiny.gguf")).metadata
    prefix = "tokenizer.ggml.normalizer."
    assert {key.removeprefix(prefix): value for key, value in made.items() if key.startswith(prefix)} == expected


MODULES = "sentence_transformers.models"
NORMALIZER = {"type": "BertNormalizer"}


@pytest.mark.parametrize(
    ("file", "content", "error", "word"),
    [
        ("config.json", {"model_type": "bert", "hidden_act": "relu"}, UnsupportedModelError, "hidden_act is relu"),
        ("config.json", {"model_type": "bert", "hidden_size": 65}, ModelFormatError, "heads can't share"),
        ("config.json", {"model_type": "bert"}, ModelFormatError, r"expected floats of \[30522, 768\]"),
        ("modules.json", [{"type": f"{MODULES}.Dense", "path": "2"}], UnsupportedModelError, "a module Dense"),
        ("modules.json", [{"type": f"{MODULES}.Pooling", "path": "../x"}], ModelFormatError, "expected a folder"),
        ("modules.json", [{"type": f"{MODULES}.Pooling", "path": "3_P"}], ModelNotFoundError, "is missing"),
        ("modules.json", {"a": 1}, ModelFormatError, "no JSON array"),
        ("1_Pooling/config.json", {"pooling_mode_max_tokens": True}, UnsupportedModelError, "max_tokens"),
        ("1_Pooling/config.json", {}, UnsupportedModelError, "its pooling is none"),
        (
            "tokenizer.json",
            changed({"normalizer": NORMALIZER | {"clean_text": False}}),
            UnsupportedModelError,
            "clean_text False, expected true",
        ),
        (
            "tokenizer.json",
            changed({"model": {"type": "WordPiece", "vocab": {"a": 0}, "max_input_chars_per_word": 50}}),
            UnsupportedModelError,
            "max_input_chars_per_word 50",
        ),
        ("tokenizer.json", changed({"normalizer": None}), UnsupportedModelError, "expected BertNormalizer"),
        ("tokenizer.json", changed({"pre_tokenizer": None}), UnsupportedModelError, "expected BertPreTokenizer"),
        ("tokenizer.json", changed({"model": {"type": "BPE", "vocab": {"a": 0}}}), UnsupportedModelError, "WordPiece"),
        ("tokenizer.json", changed({"added_tokens": [{"content": "new"}]}), UnsupportedModelError, "'new'"),
        (
            "tokenizer.json",
            changed({"model": {"type": "WordPiece", "vocab": {"a": 0, "b": 0}}}),
            ModelFormatError,
            "each once",
        ),
    ],
)
def test_what_is_refused(file: str, content: object, error: type[EdgedecError], word: str, tmp_path: Path) -> None:
    """A setting, a module or a rule that llama.cpp does not have is named."""
    folder = TinyBert().write_folder(tmp_path / "tiny")
    (folder / file).write_text(json.dumps(content))
    with pytest.raises(error, match=word):
        export_gguf(folder, tmp_path / "tiny.gguf")
    assert not (tmp_path / "tiny.gguf").exists()


def test_a_decoder_that_embeds(tmp_path: Path) -> None:
    """A decoder's checkpoint with a pooling becomes an embedding model, as qwen3-embedding is one."""
    folder = tmp_path / "tiny"
    write_checkpoint(folder, TinyHF("qwen3"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    (folder / "modules.json").write_text(json.dumps([{"type": f"{MODULES}.Pooling", "path": "1_Pooling"}]))
    with edgedec.load(export_gguf(folder, tmp_path / "tiny.gguf"), runtime="cpu", n_ctx=64) as engine:
        assert (engine.card.pooling, embed(engine, ["a text"]).shape) == ("last", (1, 64))
